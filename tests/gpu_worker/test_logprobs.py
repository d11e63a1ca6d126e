"""Log-probabilities of output and prompt tokens, against transformers; and what they must not depend on."""

import random
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaForCausalLM

from common.ids import Slot
from common.messages.plans import SlotScores
from common.messages.requests import Sampling
from gpu_worker.batch import passes
from gpu_worker.loading import LoadedModel
from gpu_worker.profile import made_up_row
from gpu_worker.runner import Outcome
from gpu_worker.slots import Limits, Row
from tests.gpu_worker.hf import hf_logits, tiny_llama
from tests.gpu_worker.world import BACKEND_NAMES, World, load, prompt

TOLERANCE = 2e-4
"""Of log-probabilities down to -60: both sides round logits of about 10 to 24 bits, some hundred times in a row."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LlamaForCausalLM]:
    path: Path = tmp_path_factory.mktemp("llama")
    theirs = tiny_llama(path, groups=3)
    return load(path), theirs


class Scored:
    """What came of one request, put together."""

    def __init__(self) -> None:
        self.prompt: dict[int, tuple[float, list[tuple[int, float]]]] = {}
        self.output: dict[int, tuple[float, list[tuple[int, float]]]] = {}

    def take(self, outcome: Outcome, slot: Slot) -> None:
        for book, rows in ((self.prompt, outcome.prompt_scores), (self.output, outcome.sampled_scores)):
            for row in rows:
                if row.slot == slot:
                    self._take(book, row)

    @staticmethod
    def _take(book: dict[int, Any], row: SlotScores) -> None:
        for index, score in enumerate(row.scores):
            assert row.first_index + index not in book, "each token is scored once"
            book[row.first_index + index] = score


def run(
    model: LoadedModel, token_ids: list[int], chunk_lens: list[int], *, backend: str = "cpu", max_logits: int = 64
) -> tuple[Scored, list[int]]:
    """Prefill in these chunks beside a neighbour, then decode to the end of chunk_lens; scores, and output tokens."""
    world = World(model, backend=backend)
    world.runner._max_logits = max_logits
    sampling = Sampling(temperature=1.0, presence_penalty=1.5, logprobs=3, prompt_logprobs=2)
    world.add("neighbour", prompt(30, seed=5), sampling=Sampling(temperature=0.0, prompt_logprobs=0), room=60)
    world.add("a", token_ids, sampling=sampling, seed=11, room=20)
    scored, output = Scored(), []
    for chunk_len in chunk_lens:
        batch = {"neighbour": min(3, world.num_left("neighbour")), "a": min(chunk_len, world.num_left("a"))}
        outcome = world.outcome({name: count for name, count in batch.items() if count})
        scored.take(outcome, Slot(1))
        output += [token for slot, token in zip(outcome.slots, outcome.token_ids, strict=True) if slot == Slot(1)]
    return scored, output


def expected(theirs: LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    return hf_logits(theirs, token_ids).log_softmax(dim=-1)


def check(scored: dict[int, Any], token_ids: list[int], logprobs: Tensor, num_top: int) -> None:
    for position, (logprob, top) in scored.items():
        before = logprobs[position - 1]
        assert logprob == pytest.approx(float(before[token_ids[position]]), abs=TOLERANCE)
        values, indices = before.topk(num_top)
        assert [token for token, _ in top] == indices.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_output_and_prompt_tokens_are_scored_as_by_transformers(
    models: tuple[LoadedModel, LlamaForCausalLM], backend: str
) -> None:
    model, theirs = models
    tokens = prompt(25)
    scored, output = run(model, tokens, [25, 1, 1, 1, 1], backend=backend)
    logprobs = expected(theirs, tokens + output)
    assert sorted(scored.prompt) == list(range(1, 25))
    assert sorted(scored.output) == list(range(25, 30))
    check(scored.prompt, tokens, logprobs, num_top=2)
    check(scored.output, tokens + output, logprobs, num_top=3)


@pytest.mark.parametrize("chunk_len", [1, 4, 7, 24])
@pytest.mark.parametrize("max_logits", [1, 5, 64])
def test_chunks_and_passes_change_no_score(
    models: tuple[LoadedModel, LlamaForCausalLM], chunk_len: int, max_logits: int
) -> None:
    model, _ = models
    tokens = prompt(25)
    whole, expected_output = run(model, tokens, [25, 1, 1])
    chunks = [chunk_len] * (25 // chunk_len) + ([25 % chunk_len] if 25 % chunk_len else [])
    scored, output = run(model, tokens, [*chunks, 1, 1], max_logits=max_logits)
    assert output == expected_output
    for mine, reference in ((scored.prompt, whole.prompt), (scored.output, whole.output)):
        assert sorted(mine) == sorted(reference)
        for position, (logprob, _) in mine.items():
            assert logprob == pytest.approx(reference[position][0], abs=TOLERANCE)


def test_what_was_scored_before_a_preemption_is_not_scored_again(models: tuple[LoadedModel, LlamaForCausalLM]) -> None:
    model, theirs = models
    tokens = prompt(25)
    world = World(model)
    world.add("a", tokens, sampling=Sampling(temperature=0.0, prompt_logprobs=0), num_scored=10)
    scored = Scored()
    for count in (4, 12, 9):
        scored.take(world.outcome({"a": count}), Slot(0))
    assert sorted(scored.prompt) == list(range(10, 25))
    check(scored.prompt, tokens, expected(theirs, tokens), num_top=0)


def test_scores_are_the_models_own_whatever_the_sampling_does(models: tuple[LoadedModel, LlamaForCausalLM]) -> None:
    model, theirs = models
    tokens = prompt(12)
    logprobs = expected(theirs, tokens)[-1]
    rare = int(logprobs.argmin())
    world = World(model)
    world.add("a", tokens, sampling=Sampling(temperature=0.5, logprobs=0, min_tokens=3, logit_bias=((rare, 100.0),)))
    outcome = world.outcome({"a": 12})
    assert outcome.token_ids == [rare]
    ((score, top),) = list(outcome.sampled_scores[0].scores)
    assert score == pytest.approx(float(logprobs[rare]), abs=TOLERANCE)
    assert top == []


def test_passes_hold_every_row_in_order_and_no_more_logits_than_they_may() -> None:
    limits = Limits(vocab_size=50, max_model_len=400, block_size=4, num_blocks=99, max_num_slots=9, max_chunk_tokens=99)
    generator = random.Random(3)
    for max_logits in (1, 2, 5, 17):
        rows = []
        for slot in range(6):
            row = made_up_row(limits, slot, generator.randrange(5), generator.randrange(1, 40), first_block=0)
            row.resident.sampling = Sampling(prompt_logprobs=0 if generator.random() < 0.6 else None)
            row.resident.num_scored = generator.randrange(20)
            rows.append(Row(row.resident, row.start, row.num_tokens, is_sampled=generator.random() < 0.7))
        cut = list(passes(rows, max_logits))
        assert all(sum(row.num_logits for row in together) <= max_logits for together in cut)
        for row in rows:
            parts = [part for together in cut for part in together if part.resident is row.resident]
            assert [part.start for part in parts[1:]] == [part.start + part.num_tokens for part in parts[:-1]]
            assert sum(part.num_tokens for part in parts) == row.num_tokens
            assert [token for part in parts for token in part.scored] == list(row.scored)
            assert [part.is_sampled for part in parts] == [False] * (len(parts) - 1) + [row.is_sampled]
