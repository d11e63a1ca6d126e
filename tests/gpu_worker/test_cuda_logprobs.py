"""Log-probabilities on the device runner, without a wait: what the CPU's runner says of the same requests."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.messages.plans import SlotScores
from common.messages.requests import Sampling
from gpu_worker.cuda.results import Computed
from gpu_worker.loading import LoadedModel
from gpu_worker.runner import Outcome
from tests.gpu_worker.device_world import GREEDY, DeviceWorld
from tests.gpu_worker.hf import tiny_llama
from tests.gpu_worker.world import World, load, prompt

TOLERANCE = 2e-4
"""As of the CPU's runner against transformers: logits of about 10 are rounded some hundred times in a row."""
REQUESTS = {
    "plain": GREEDY,
    "output": Sampling(temperature=1.0, top_k=30, presence_penalty=1.5, logprobs=3),
    "both": Sampling(temperature=0.0, logprobs=0, prompt_logprobs=2, logit_bias=((7, 40.0),)),
    "prompt": Sampling(temperature=0.0, prompt_logprobs=0),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama(path, groups=3)
    return load(path)


def assert_equal(actual: Sequence[SlotScores], expected: Sequence[SlotScores]) -> None:
    """Compare the scores of one iteration, in whichever order its requests come."""
    mine, theirs = (sorted(scores, key=lambda row: row.slot) for scores in (actual, expected))
    assert [(row.slot, row.first_index) for row in mine] == [(row.slot, row.first_index) for row in theirs]
    for row, reference in zip(mine, theirs, strict=True):
        assert row.scores.num_top == reference.scores.num_top
        for (logprob, top), (known, known_top) in zip(row.scores, reference.scores, strict=True):
            assert logprob == pytest.approx(known, abs=TOLERANCE)
            assert [token for token, _ in top] == [token for token, _ in known_top]
            assert [value for _, value in top] == pytest.approx([value for _, value in known_top], abs=TOLERANCE)


def run(worlds: tuple[World, DeviceWorld], batch: dict[str, int]) -> tuple[Outcome, Computed]:
    """Run one iteration on both, and compare what comes of it."""
    reference, world = worlds
    expected, computed = reference.outcome(batch), world.computed(batch)
    assert computed.token_ids == expected.token_ids
    assert_equal(computed.sampled_scores, expected.sampled_scores)
    assert_equal(computed.prompt_scores, expected.prompt_scores)
    return expected, computed


@pytest.mark.parametrize("seed", range(4))
def test_hybrid_batches_are_scored_as_by_the_cpu_runner(model: LoadedModel, seed: int) -> None:
    worlds = World(model), DeviceWorld(model, max_num_slots=4)  # Its head takes 4 rows at a time.
    generator = random.Random(seed)
    for name, sampling in REQUESTS.items():
        for world in worlds:
            world.add(name, prompt(17, seed=len(name)), sampling=sampling, seed=5, room=12)
    num_scores = [0, 0]
    for _ in range(12):
        batch = {name: min(generator.choice((0, 1, 1, 5, 8)), worlds[0].num_left(name)) for name in REQUESTS}
        if not any(batch.values()):
            continue
        outcome, _ = run(worlds, {name: count for name, count in batch.items() if count})
        num_scores[0] += len(outcome.sampled_scores)
        num_scores[1] += sum(row.scores.num_tokens for row in outcome.prompt_scores)
    assert num_scores[0] > 2
    assert num_scores[1] > 16


def test_decodes_out_of_a_graph_are_scored_one_ahead(model: LoadedModel) -> None:
    reference, world = World(model), DeviceWorld(model)
    expected: list[SlotScores] = []
    for name in ("plain", "output"):
        for each in (reference, world):
            each.add(name, prompt(9, seed=3), sampling=REQUESTS[name], seed=5, room=9)
        run((reference, world), {name: 9})
    replayed: list[int] = []
    world.device.on_replay = replayed.append
    batch = dict.fromkeys(("plain", "output"), 1)
    for _ in range(6):
        expected += reference.outcome(batch).sampled_scores
    due, scores = [], []
    for _ in range(6):
        due.append(world.launch(batch)[1])
        if len(due) == world.runner.max_in_flight:
            scores += due.pop(0).wait().sampled_scores
    scores += due.pop().wait().sampled_scores
    assert replayed == [2] * 6
    for mine, theirs in zip(scores, expected, strict=True):
        assert_equal([mine], [theirs])


def test_what_was_scored_before_a_preemption_is_not_scored_again(model: LoadedModel) -> None:
    worlds = World(model), DeviceWorld(model)
    for world in worlds:
        world.add("a", prompt(25), sampling=REQUESTS["prompt"], room=1, num_scored=10)
    scored = [row for count in (4, 12, 9) for row in run(worlds, {"a": count})[1].prompt_scores]
    tokens = [range(row.first_index, row.first_index + row.scores.num_tokens) for row in scored]
    assert [index for each in tokens for index in each] == list(range(10, 25))


class LogitsRows(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own.
    """Notes how many rows of a vocabulary's width each operation returns."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own.
        self._vocab_size = vocab_size
        self.nums_rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_head = func.overloadpacket is torch.ops.aten.t  # The weights themselves, seen from the other side.
        if isinstance(result, Tensor) and result.shape[1:] == (self._vocab_size,) and not is_head:
            self.nums_rows.append(len(result))
        return result


def test_a_scored_prompt_never_has_more_logits_at_a_time_than_there_are_slots(model: LoadedModel) -> None:
    world = DeviceWorld(model, max_num_slots=3)
    world.add("a", prompt(25), sampling=REQUESTS["both"], room=1)
    with LogitsRows(model.config.vocab_size) as logits:
        computed = world.computed({"a": 25})
    assert sum(row.scores.num_tokens for row in computed.prompt_scores) == 24
    assert max(logits.nums_rows) == 3
