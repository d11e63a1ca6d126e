"""Do several ranks give the tokens of one? What they do together, and a small model over the devices that there are."""

import json
import os
import subprocess
import sys
import tempfile
import zlib
from typing import Any

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionSpec
from gpu_worker.check.setup import candidates, open_device, preferred, random_tokens, resident_of
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

TIMEOUT_S = 60.0
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


class RankFailed(Exception):
    """A rank ended with an error, or hangs; the message is its own."""


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


def check_ranks(kind: str, tp: int, pp: int) -> dict[str, Any]:
    """Compare the greedy tokens of tp * pp ranks, a process and a device each, with those of one.

    Args:
        kind: Of device: cpu or cuda.
        tp: Ranks of a stage.
        pp: Stages.

    Returns:
        How many tokens there were, and how many agreed.

    Raises:
        RankFailed: If a rank ends with an error, or hangs.
    """
    device = open_device(kind)
    expected = _generate(device, Group.alone(device.torch_device))
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, kind, str(tp), str(pp), str(rank), f"{directory}/store"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(tp * pp)
        ]
        try:
            ends = [rank.communicate(timeout=2 * TIMEOUT_S) for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise RankFailed(f"a rank hangs for {error.timeout:g} s") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for rank, (_, errors) in zip(ranks, ends, strict=True):
        if rank.returncode:
            raise RankFailed(errors.strip().rpartition("\n")[2])
    tokens = next(tokens for output, _ in ends if (tokens := json.loads(output)))
    return {
        "tokens": len(expected),
        "agreeing": sum(mine == theirs for mine, theirs in zip(tokens, expected, strict=True)),
    }


def _generate(device: Device, group: Group) -> list[int]:
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
    attention = preferred(candidates(spec), device)
    runner = new_runner(device, model, attention, operations_for(device.torch_device), spec, limits, group)
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


def _main(kind: str, tp: str, pp: str, rank: str, store: str) -> None:
    """Be one of the ranks of check_ranks; print what it samples."""
    layout = Layout(tp=int(tp), pp=int(pp), rank=int(rank))
    device = open_device(kind, layout.rank)
    if kind == "cpu":
        torch.set_num_threads(1)
    file = c10d.FileStore(store, layout.num_ranks)
    tokens = _generate(device, Group(file, layout, device.torch_device, TIMEOUT_S, has_way_back=True))
    print(json.dumps(tokens), flush=True)
    file.set(f"through-{rank}", "")
    file.wait([f"through-{other}" for other in range(layout.num_ranks)])  # None leaves while another needs it.
    os._exit(0)  # As ranks in service: collectives' own ends may wait for each other.


if __name__ == "__main__":
    _main(*sys.argv[1:])
