"""The device runner on the CPU: graphs by buckets, buffers that stay, one iteration ahead, and no look at a value."""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from common.messages.requests import Sampling
from gpu_worker.cuda.model import is_fusible
from gpu_worker.cuda.runner import BUCKETS
from gpu_worker.loading import LoadedModel
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.llama import Llama
from gpu_worker.models.rope import RopeConfig
from tests.gpu_worker.device_world import GREEDY, DeviceWorld, NoWaits
from tests.gpu_worker.hf import FAMILIES, hf_greedy, tiny_llama, tiny_of
from tests.gpu_worker.world import World, load, prompt

LENGTHS = (1, 2, 5, 9, 17, 40)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def hf(path: Path) -> LlamaForCausalLM:
    return tiny_llama(path, groups=3, max_position_embeddings=96)


@pytest.fixture(scope="module")
def model(path: Path, hf: LlamaForCausalLM) -> LoadedModel:
    return load(path)


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("chunk_len", [7, 64])
def test_greedy_tokens_equal_transformers(
    model: LoadedModel, hf: LlamaForCausalLM, chunk_len: int, has_graphs: bool
) -> None:
    world = DeviceWorld(model, has_graphs=has_graphs)
    world.add("a", prompt(33), room=12)
    first = world.prefill("a", chunk_len)
    assert [first, *world.decode(["a"], 11)["a"]] == hf_greedy(hf, prompt(33), 12)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_k=30, top_p=0.9)], ids=["greedy", "warm"])
def test_hybrid_batches_one_ahead_give_what_the_cpu_runner_gives(model: LoadedModel, sampling: Sampling) -> None:
    reference, world = World(model), DeviceWorld(model)
    expected: dict[str, list[int]] = {}
    for length in LENGTHS:
        reference.add(str(length), prompt(length), sampling=sampling, seed=length, room=9)
        expected |= reference.generate([str(length)], 9)

    iterations: list[dict[str, int]] = []
    left: dict[str, int] = {}  # tokens that each is still to decode
    for length in (*LENGTHS, *[0] * 9):  # Each prompt rides in two parts beside those that decode already.
        for part in _halves(length):
            batch = dict.fromkeys((name for name, count in left.items() if count), 1)
            left = {name: count - (count > 0) for name, count in left.items()}
            iterations.append({**batch, str(length): part} if part else batch)
        if length:
            world.add(str(length), prompt(length), room=9, sampling=sampling, seed=length)
            left[str(length)] = 8
    assert world.run([batch for batch in iterations if batch], ahead=True) == expected


def test_heads_that_triton_cannot_count_are_not_fused() -> None:
    """Phi-3's of 96 elements, which flash-attn takes, and the fused rotation does not."""
    config = ModelConfig(
        num_layers=1,
        vocab_size=8,
        hidden_size=96,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=96,
        rope=RopeConfig(theta=1e4),
        max_model_len=8,
        rms_norm_eps=1e-5,
        is_tied=True,
    )
    assert [is_fusible(Llama(), replace(config, head_dim=size)) for size in (64, 96, 128)] == [True, False, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_computed(tmp_path: Path, family: str) -> None:
    theirs = tiny_of(family, tmp_path)
    world = DeviceWorld(load(tmp_path))
    world.add("a", prompt(40), room=12)
    first = world.prefill("a", 7)
    assert [first, *world.decode(["a"], 11, ahead=True)["a"]] == hf_greedy(theirs, prompt(40), 12)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, repetition_penalty=1.8),
        Sampling(temperature=0.0, frequency_penalty=1.5, presence_penalty=-0.7),
        Sampling(temperature=0.7, presence_penalty=2.0, repetition_penalty=0.8, top_k=20),
        Sampling(logit_bias=((3, 30.0), (9, 30.5), (11, -100.0))),
    ],
)
def test_penalties_and_biases_see_every_token_of_a_request_one_ahead(model: LoadedModel, sampling: Sampling) -> None:
    reference, world = World(model), DeviceWorld(model)
    for name in "ab":  # Beside one that asks for nothing.
        mine = sampling if name == "a" else GREEDY
        reference.add(name, prompt(9, seed=ord(name)), sampling=mine, seed=4, room=24)
        world.add(name, prompt(9, seed=ord(name)), sampling=mine, seed=4, room=24)
    expected = {name: [reference.prefill(name, 64)] for name in "ab"}
    output = {name: [world.prefill(name, 5)] for name in "ab"}
    for name, tokens in reference.generate("ab", 20).items():
        expected[name] += tokens
    for name, tokens in world.decode("ab", 20, ahead=True).items():
        output[name] += tokens
    assert output == expected


def _halves(length: int) -> tuple[int, ...]:
    """Return two parts of a length, or one where it cannot be cut."""
    return (length,) if length < 2 else (length // 2, length - length // 2)


def test_a_decode_batch_takes_the_smallest_graph_that_holds_it_and_a_chunk_none(model: LoadedModel) -> None:
    world = DeviceWorld(model, max_num_slots=12)
    assert world.runner.buckets == (1, 2, 4, 8, 12)
    assert world.device.captured == [12, 8, 4, 2, 1]
    replayed: list[int] = []
    world.device.on_replay = replayed.append
    for name in "abcde":
        world.add(name, prompt(6), room=4)
        world.prefill(name, 6)
    assert replayed == []
    for count in (1, 2, 3, 5):
        world.decode("abcde"[:count], 1)
    world.iterate({"a": 1, "b": 1})
    world.add("f", prompt(9), room=1)
    world.iterate({"a": 1, "f": 9})
    assert replayed == [1, 2, 4, 8, 2]


def test_a_batch_above_the_largest_graph_is_computed_without_one(model: LoadedModel) -> None:
    assert BUCKETS[-1] == 256
    world = DeviceWorld(model, max_num_slots=258, num_blocks=600)
    assert world.runner.buckets[-1] == 256
    names = [str(index) for index in range(258)]
    for name in names:
        world.add(name, [int(name) % 7], room=3)
    first = world.iterate(dict.fromkeys(names, 1))
    assert len(first) == 258
    assert {name: first[name] for name in ("0", "7")} == {"0": first["0"], "7": first["0"]}


def test_what_fills_up_a_graphs_batch_touches_no_token_of_a_request(model: LoadedModel) -> None:
    world = DeviceWorld(model)
    for name in "abcde":
        world.add(name, prompt(6), room=8)
        world.prefill(name, 6)
    pools = (*world.runner.kv_cache.keys, *world.runner.kv_cache.values)
    for pool in pools:
        pool.fill_(7.0)  # What is written to shows, even where it is what was there before.
    world.decode("abcde", 1)  # in the graph for 8
    block_size = world.limits.block_size
    expected = sorted([resident.block_table[6 // block_size], 6 % block_size] for resident in world.residents.values())
    for pool in pools:
        assert (pool[:-1] != 7.0).any(dim=(2, 3)).nonzero().tolist() == expected


def test_nothing_is_left_over_from_the_iteration_before(model: LoadedModel) -> None:
    clean, poisoned = DeviceWorld(model), DeviceWorld(model)
    outputs = []
    for world in (clean, poisoned):
        for name in "abc":
            world.add(name, prompt(ord(name) % 11 + 3), room=12)
            world.prefill(name, 64)
        output = []
        for names in ("abc", "a", "bc", "cba"):
            if world is poisoned:
                for buffer in world.device.host_buffers:
                    buffer.fill_(3)
            output.append(world.decode(names, 2))
        outputs.append(output)
    assert outputs[0] == outputs[1]


def test_a_request_in_a_slot_that_another_had_sees_nothing_of_it(model: LoadedModel) -> None:
    world, fresh = DeviceWorld(model), DeviceWorld(model)
    world.add("old", prompt(40), room=8, sampling=Sampling(top_k=3), seed=1)
    world.prefill("old", 64)
    world.decode(["old"], 3)
    world.remove("old")
    for each in (world, fresh):
        each.add("new", prompt(11, seed=4), room=8, sampling=Sampling(min_p=0.1), seed=2)
    assert world.prefill("new", 4) == fresh.prefill("new", 11)
    assert world.decode(["new"], 7, ahead=True) == fresh.decode(["new"], 7)


def test_blocks_that_come_later_are_used(model: LoadedModel) -> None:
    world, whole = DeviceWorld(model), DeviceWorld(model)
    for each in (world, whole):
        each.add("a", prompt(4), room=0 if each is world else 20)
    assert world.prefill("a", 4) == whole.prefill("a", 4)
    grown = []
    for _ in range(5):
        block = world.free_blocks.pop()
        world.residents["a"].block_table.append(block)
        grown += world.decode(["a"], 4, ahead=True)["a"]
    assert grown == whole.decode(["a"], 20)["a"]


def test_results_come_in_the_order_of_the_rows(model: LoadedModel) -> None:
    world, alone = DeviceWorld(model), {}
    for index, name in enumerate("abcd"):
        other = DeviceWorld(model)
        for each in (world, other):
            each.add(name, prompt(5 + index, seed=index), room=4)
        alone[name] = [other.prefill(name, 64), *other.decode([name], 1)[name]]
    # b decodes, and stands between chunks of which one is not sampled.
    assert world.prefill("b", 64) == alone["b"][0]
    sampled = world.iterate({"a": 5, "d": 3, "b": 1, "c": 7})
    assert sampled == {"a": alone["a"][0], "b": alone["b"][1], "c": alone["c"][0]}
    assert list(sampled) == ["a", "b", "c"]


def test_ends_are_barred_until_the_least_number_of_tokens(model: LoadedModel) -> None:
    world = DeviceWorld(model)
    world.add("free", prompt(20), room=8)
    likeliest = world.prefill("free", 64)
    sampling = Sampling(temperature=0.0, min_tokens=1, stop_token_ids=(likeliest,))
    world.add("barred", prompt(20), room=8, sampling=sampling)
    assert world.prefill("barred", 64) != likeliest


def test_a_graph_is_not_replayed_on_buffers_that_have_moved(model: LoadedModel) -> None:
    world = DeviceWorld(model)
    world.add("a", prompt(6), room=4)
    world.prefill("a", 64)
    object.__setattr__(world.runner.kv_cache, "keys", tuple(keys.clone() for keys in world.runner.kv_cache.keys))
    with pytest.raises(AssertionError, match="moved"):
        world.decode(["a"], 1)


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize(
    "look",
    [
        lambda tensor: tensor[0].item(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.index_put_((tensor > 0,), tensor[0]),
        lambda tensor: bool((tensor > 0).all()),
        lambda tensor: tensor.nonzero(),
        lambda tensor: float(tensor.sum()),
        lambda tensor: torch.where(tensor > 0),
        lambda tensor: tensor.repeat_interleave(tensor.long()),
    ],
)
def test_a_look_at_a_value_would_be_seen(look: Callable[[Tensor], object], is_inference: bool) -> None:
    with torch.inference_mode(is_inference), pytest.raises(AssertionError, match="wait"), NoWaits():
        look(torch.ones(3))


def test_device_tensors_are_turned_into_python_values_in_one_place() -> None:
    """What the dispatch mode cannot see: these copy without an operation."""
    folder = Path(__file__).parent.parent.parent / "gpu_worker/cuda"
    calls = [
        f"{path.name} {node.func.attr}"
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("tolist", "item", "cpu", "numpy", "nonzero", "unique")
    ]
    # One to write a host buffer, two to read what the iteration's one wait has brought.
    assert sorted(calls) == ["results.py numpy", "results.py tolist", "runner.py numpy"]


def test_no_number_is_put_at_places_that_the_device_knows() -> None:
    """Torch makes it a tensor on the host, and has the host wait until it is copied; NoWaits cannot see that."""
    folder = Path(__file__).parent.parent.parent / "gpu_worker/cuda"
    puts = [
        f"{path.name} {ast.unparse(target)}"
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign) and _is_number(node.value)
        for target in node.targets
        if isinstance(target, ast.Subscript)
    ]
    # In a dictionary, and in the host's own array.
    assert puts == ["buffers.py self._table_lens[slot]", "runner.py sections[1, 0]"]


def _is_number(value: ast.expr) -> bool:
    is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("float", "int")
    return is_call or isinstance(value, ast.Constant | ast.UnaryOp)
