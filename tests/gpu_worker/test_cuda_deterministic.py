"""`--deterministic` on the device runner, its kernels interpreted: one request's bits, whatever its batches are."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from common.messages.requests import Sampling
from gpu_worker.attention.triton import InvariantTritonAttention
from gpu_worker.cuda.operations import InvariantOperations
from gpu_worker.loading import LoadedModel
from gpu_worker.slots import Row
from tests.gpu_worker.device_world import DeviceWorld
from tests.gpu_worker.hf import tiny_llama
from tests.gpu_worker.world import load, prompt

PROMPT_LEN = 9
SUMS = (torch.ops.aten.logsumexp, torch.ops.aten.cumsum, torch.ops.aten.log_softmax, torch.ops.aten.sum)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama(path, groups=4, num_hidden_layers=2)
    return load(path)


def new_world(model: LoadedModel, *, has_graphs: bool) -> DeviceWorld:
    backend, operations = InvariantTritonAttention(), InvariantOperations()
    return DeviceWorld(model, has_graphs=has_graphs, max_num_slots=2, backend=backend, operations=operations)


@pytest.fixture(scope="module")
def world(model: LoadedModel) -> DeviceWorld:
    """With graphs for 1 and 2 rows, and requests whose tokens are all known."""
    world = new_world(model, has_graphs=True)
    for index, name in enumerate("ab"):
        world.add(name, prompt(PROMPT_LEN, seed=index), room=0)
    return world


def logits(world: DeviceWorld, *pieces: tuple[str, int, int]) -> list[Tensor]:
    """Compute tokens [start, end) of each request in one iteration; return the logits after each one's last."""
    rows = [Row(world.residents[name], start, end - start, is_sampled=True) for name, start, end in pieces]
    return list(world.runner.logits(rows))


def pieces_of(generator: random.Random) -> Iterator[tuple[int, int]]:
    """Cut a prompt at random; half of the pieces are decodes."""
    start = 0
    while start < PROMPT_LEN:
        end = min(PROMPT_LEN, start + generator.choice((1, generator.randrange(2, 6))))
        yield start, end
        start = end


@pytest.mark.parametrize("seed", range(2))
def test_logits_are_the_same_to_the_bit_in_any_chunks_beside_anyone_and_recomputed(
    world: DeviceWorld, seed: int
) -> None:
    generator = random.Random(seed)
    for start, end in pieces_of(generator):
        others = []
        if generator.random() < 0.6:
            at = generator.randrange(PROMPT_LEN - 3)
            others = [("b", at, at + generator.choice((1, 3)))]
        *_, mine = logits(world, *others, ("a", start, end))
    (whole,) = logits(world, ("a", 0, PROMPT_LEN))
    assert torch.equal(mine, whole)
    (decoded,) = logits(world, ("a", PROMPT_LEN - 1, PROMPT_LEN))
    assert torch.equal(decoded, whole)


class SummedRows(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own.
    """Notes of how many rows at a time sums are taken."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own.
        self.nums_rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in SUMS and args[0].dtype.is_floating_point:
            self.nums_rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_tokens_are_drawn_and_scored_by_sums_over_one_row_at_a_time(model: LoadedModel) -> None:
    world = new_world(model, has_graphs=False)
    for name in "ab":
        world.add(name, prompt(4), room=2, sampling=Sampling(top_p=0.9, logprobs=2, prompt_logprobs=0), seed=3)
    with SummedRows() as sums:
        computed = world.computed({"a": 4, "b": 4})
    assert computed.token_ids[0] == computed.token_ids[1]
    assert computed.sampled_scores[0].scores == computed.sampled_scores[1].scores
    assert len(sums.nums_rows) > 8
    assert set(sums.nums_rows) == {1}
