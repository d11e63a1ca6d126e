"""Do several ranks give the tokens of one? What they do together, and a small model over the devices that there are."""

import threading
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionBackend, AttentionSpec
from gpu_worker.check.setup import random_tokens, resident_of
from gpu_worker.cuda.build import new_runner
from gpu_worker.cuda.device import Device
from gpu_worker.cuda.operations import operations_for
from gpu_worker.loading import load_model
from gpu_worker.loading.source import ModelSource
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.llama import Llama
from gpu_worker.models.rope import RopeConfig
from gpu_worker.parallel.collectives import Collectives, c10d, new_backend
from gpu_worker.parallel.group import Group
from gpu_worker.parallel.layout import Layout
from gpu_worker.parallel.shard import shard
from gpu_worker.slots import Limits, Row

TIMEOUT_S = 30.0
"""How long ranks wait for each other."""
CONFIG = ModelConfig(
    num_layers=4,
    vocab_size=999,  # does not come apart evenly
    hidden_size=128,
    intermediate_size=192,
    num_heads=4,
    num_kv_heads=1,  # held by every rank of a stage
    head_dim=64,
    rope=RopeConfig(theta=1e4),
    max_model_len=256,
    rms_norm_eps=1e-5,
    is_tied=False,
)
PROMPT_LENS = (50, 17)
CHUNK_LEN = 20
NUM_DECODES = 12
T = TypeVar("T")


def check_collectives(device: Device) -> list[str]:
    """Do with a group of one rank what ranks of a stage do, out of a graph too; return what went wrong.

    More is not to be had of one device: NCCL refuses two ranks on it. What is seen is that the library loads, that what
    torch asks of it is what it takes, and that a graph can hold it.
    """
    alone = Collectives(new_backend(c10d.HashStore(), 0, 1, device.torch_device.type, TIMEOUT_S), 0, 1)
    values = torch.arange(12, dtype=torch.float32, device=device.torch_device).view(3, 4)
    expected = values.clone()
    result = torch.zeros_like(values)

    def run() -> Tensor:
        doubled = alone.reduce(values * 2)
        gathered = alone.gather(alone.broadcast(doubled), 4)
        assert gathered is not None, "the first rank has them all"
        return result.copy_(gathered)

    wrong = [] if torch.equal(run(), 2 * expected) else ["eager"]
    device.synchronize()
    graph = device.capture(run, lambda: (values, result))
    for factor in (1.0, 3.0):
        values.copy_(expected * factor)
        if not torch.equal(graph.replay(), 2 * factor * expected):
            wrong.append(f"out of a graph, {factor:g}")
    return wrong


def check_ranks(
    open_device: Callable[[int], Device], attention: Callable[[AttentionSpec], AttentionBackend[Any]], tp: int, pp: int
) -> dict[str, Any]:
    """Compare the greedy tokens of tp * pp ranks, a device and a thread each, with those of one.

    Args:
        open_device: Makes the device of that index the calling thread's, and returns it.
        attention: Chooses a back end.
        tp: Ranks of a stage.
        pp: Stages.

    Returns:
        How many tokens there were, and how many agreed.
    """
    expected = _generate(open_device(0), attention, Group.alone(open_device(0).torch_device))

    def run(layout: Layout, meet: Callable[[torch.device], Group]) -> list[int]:
        device = open_device(layout.rank)
        return _generate(device, attention, meet(device.torch_device))

    tokens = next(tokens for tokens in run_ranks(tp, pp, run) if tokens)
    return {
        "tokens": len(expected),
        "agreeing": sum(mine == theirs for mine, theirs in zip(tokens, expected, strict=True)),
    }


def run_ranks(
    tp: int, pp: int, run: Callable[[Layout, Callable[[torch.device], Group]], T], *, do_stay: bool = True
) -> list[T]:
    """Run as every rank at a time, each in a thread of its own; return what each returned.

    Args:
        tp: Ranks of a stage.
        pp: Stages.
        run: Given a rank's place and a function that makes its group, with which it meets the others.
        do_stay: Whether a rank that is through stays connected until all are.

    Raises:
        BaseException: What the first of them has raised; TimeoutError if one hangs.
    """
    store = c10d.HashStore()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    staying: list[Group] = []

    def main(rank: int) -> None:
        layout = Layout(tp=tp, pp=pp, rank=rank)

        def meet(device: torch.device) -> Group:
            group = Group(store, layout, device, TIMEOUT_S, has_way_back=True)
            if do_stay:
                staying.append(group)
            return group

        try:
            results[rank] = run(layout, meet)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(tp * pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        if thread.is_alive() and not errors:
            raise TimeoutError("a rank hangs")
    for error in errors.values():
        raise error  # The first: others follow from it.
    return [results[rank] for rank in range(tp * pp)]


def _generate(device: Device, attention: Callable[[AttentionSpec], AttentionBackend[Any]], group: Group) -> list[int]:
    """Return what two requests sample, on the rank that samples: prompts in chunks, then decodes out of graphs."""
    model = load_model(shard(_drawn_source(), group.layout), torch.float32, device=device.torch_device)
    spec = AttentionSpec.of(model.config, device=str(device.torch_device), dtype=torch.float32, block_size=16)
    limits = Limits(
        vocab_size=CONFIG.vocab_size,
        max_model_len=CONFIG.max_model_len,
        block_size=spec.block_size,
        num_blocks=16,
        max_num_slots=4,
        max_chunk_tokens=64,
    )
    runner = new_runner(device, model, attention(spec), operations_for(device.torch_device), spec, limits, group)
    runner.warm_up()
    residents = [
        resident_of(slot, random_tokens(length, CONFIG.vocab_size, seed=slot), range(8 * slot, 8 * slot + 8))
        for slot, length in enumerate(PROMPT_LENS)
    ]
    ends = [0, 0]  # of what each has computed
    tokens: list[int] = []
    for _ in range(NUM_DECODES):
        rows = []
        for slot, (resident, length) in enumerate(zip(residents, PROMPT_LENS, strict=True)):
            start, num_tokens = ends[slot], max(1, min(CHUNK_LEN, length - ends[slot]))
            ends[slot] += num_tokens
            rows.append(Row(resident, start, num_tokens, is_sampled=ends[slot] >= length))
        tokens += runner.run(rows)
    return tokens


def _drawn_source() -> ModelSource:
    """Return the model whole, its tensors drawn at random by their names: what each rank reads its part of."""
    heads, kv_heads = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    shapes = {
        "model.embed_tokens.weight": (CONFIG.vocab_size, hidden),
        "lm_head.weight": (CONFIG.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(CONFIG.num_layers):
        of_layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv_heads, hidden),
            "self_attn.v_proj": (kv_heads, hidden),
            "self_attn.o_proj": (hidden, heads),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}

    def read(name: str) -> Tensor:
        shape, generator = shapes[name], torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(shape, generator=generator)
        return 1 + 0.1 * drawn if len(shape) == 1 else drawn * shape[1] ** -0.5

    return ModelSource(family=Llama(), config=CONFIG, eos_token_ids=(), tensor_names=frozenset(shapes), read=read)
