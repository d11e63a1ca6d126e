"""Log-probabilities through the scheduler: each token's once, whatever happens on the way."""

import pytest

from common.ids import Slot, WorkerId
from common.messages.logprobs import TokenScores
from common.messages.plans import Plan, SlotScores
from common.messages.requests import Sampling
from common.messages.streams import PromptScored, StreamBatch, TokensSampled
from services.scheduler.events import DismissWorker, RequestPreempted, SendStreams
from tests.services.scheduler.world import FakeDevice, World

NUM_TOP = 2


def scores_of(first: int, num_tokens: int) -> TokenScores:
    """Made up, so that the token's index can be told from its score."""
    indices = range(first, first + num_tokens)
    ids = [index for index in indices for _ in range(NUM_TOP)]
    return TokenScores.of(
        [-float(index) for index in indices], ids, [-float(index) for index in indices for _ in range(NUM_TOP)]
    )


class ScoringWorld(World):
    """Its workers score what requests ask for, by the meaning of the messages."""

    def scores(
        self, worker_id: WorkerId, plan: Plan, sampled: list[tuple[Slot, int]]
    ) -> tuple[tuple[SlotScores, ...], tuple[SlotScores, ...]]:
        device = self.devices[worker_id]
        assert isinstance(device, FakeDevice)
        prompts, outputs = [], []
        for chunk in plan.chunks:
            request = device.residents[chunk.slot].request
            if request.sampling.prompt_logprobs is not None:
                first = max(chunk.start + 1, request.num_scored)
                count = min(chunk.start + chunk.num_tokens + 1, request.num_prompt_tokens) - first
                if count > 0:
                    prompts.append(SlotScores(chunk.slot, first, scores_of(first, count)))
        for slot, _ in sampled:
            resident = device.residents[slot]
            if resident.request.sampling.logprobs is not None:
                index = len(resident.token_ids) - 1
                outputs.append(SlotScores(slot, index, scores_of(index, 1)))
        return tuple(outputs), tuple(prompts)

    def batches(self) -> list[StreamBatch]:
        return [effect.batch for effect in self.effects if isinstance(effect, SendStreams)]

    def scored(self, name: str) -> list[PromptScored]:
        return [row for batch in self.batches() for row in batch.scored if row.request_id == name]

    def sampled(self, name: str) -> list[TokensSampled]:
        return [row for batch in self.batches() for row in batch.sampled if row.request_id == name]

    def check_scored(self, name: str, prompt_len: int) -> None:
        """Every prompt token but the first has its own score, once and in order."""
        indices = [-int(score) for row in self.scored(name) for score, _ in row.scores]
        assert indices == list(range(1, prompt_len))
        assert [row.first_index for row in self.scored(name)] == [
            -int(next(iter(r.scores))[0]) for r in self.scored(name)
        ]


ALL = Sampling(temperature=0.0, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)


@pytest.mark.parametrize("depth", [1, 2])
def test_scores_travel_with_their_tokens_and_prompts_in_order_before_them(depth: int) -> None:
    world = ScoringWorld(token_budget=8, depth=depth)
    world.arrive("plain", prompt_len=5, max_tokens=3)
    world.arrive("a", prompt_len=30, max_tokens=4, sampling=ALL)
    world.drain()
    world.check_scored("a", 30)
    assert len(world.scored("a")) > 2, "in chunks"
    for index, row in enumerate(world.sampled("a")):
        assert row.scores is not None
        ((score, top),) = list(row.scores)
        assert score == -(30.0 + index)
        assert len(top) == NUM_TOP
    assert all(row.scores is None for row in world.sampled("plain"))
    assert not world.scored("plain")


def test_a_scored_prompt_is_read_in_chunks_that_hold_nobody_up_however_large_the_budget() -> None:
    world = ScoringWorld(token_budget=2048, num_blocks=512)
    world.arrive("a", prompt_len=600, max_tokens=1, sampling=ALL)
    world.arrive("plain", prompt_len=600, max_tokens=1)
    world.drain()
    world.check_scored("a", 600)
    chunks = {
        name: [c.num_tokens for i in world.iterations for c in i.chunks if c.request_id == name]
        for name in ("a", "plain")
    }
    assert chunks == {"a": [256, 256, 88], "plain": [600]}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_preempted_half_way_is_scored_once(depth: int) -> None:
    world = ScoringWorld(token_budget=8, block_size=4, num_blocks=12, depth=depth)
    world.arrive("a", prompt_len=30, max_tokens=6, priority=5, sampling=ALL)
    world.finish_iteration()
    world.finish_iteration()
    num_scored = sum(row.scores.num_tokens for row in world.scored("a"))
    assert 0 < num_scored < 29
    world.arrive("urgent", prompt_len=30, max_tokens=4)
    world.drain()
    assert [effect.request_id for effect in world.effects if isinstance(effect, RequestPreempted)] == ["a"]
    world.check_scored("a", 30)
    assert [-int(score) for row in world.sampled("a") for score, _ in row.scores or ()] == list(range(30, 36))


def test_a_prompt_half_scored_by_a_lost_worker_is_scored_on_by_another() -> None:
    world = ScoringWorld(token_budget=8)
    world.arrive("a", prompt_len=30, max_tokens=2, sampling=ALL)
    world.finish_iteration()
    world.finish_iteration()
    assert len(world.scored("a")) == 2
    world.lose(next(iter(world.devices)))
    world.join()
    world.drain()
    world.check_scored("a", 30)
    assert world.reason("a") == "length"


def test_a_refused_plan_costs_no_score() -> None:
    world = ScoringWorld(token_budget=8, depth=2)
    world.arrive("a", prompt_len=30, max_tokens=2, sampling=ALL)
    world.finish_iteration()
    world.refuse(next(iter(world.devices)))
    world.drain()
    world.check_scored("a", 30)


def test_a_prompt_that_is_scored_takes_nothing_from_the_prefix_cache() -> None:
    world = ScoringWorld(token_budget=64, has_prefix_cache=True)
    tokens = list(range(100, 120))
    world.arrive("first", prompt_len=20, tokens=tokens, max_tokens=2)
    world.drain()
    world.arrive("scored", prompt_len=20, tokens=tokens, max_tokens=2, sampling=ALL)
    world.drain()
    world.check_scored("scored", 20)
    world.arrive("plain", prompt_len=20, tokens=tokens, max_tokens=2)
    world.drain()
    assert world.sampled("plain")[0].num_cached_tokens > 0


@pytest.mark.parametrize("fault", ["none", "short", "elsewhere", "unasked"])
def test_a_worker_whose_scores_are_not_those_asked_for_is_dismissed(fault: str) -> None:
    class Faulty(ScoringWorld):
        def scores(
            self, worker_id: WorkerId, plan: Plan, sampled: list[tuple[Slot, int]]
        ) -> tuple[tuple[SlotScores, ...], tuple[SlotScores, ...]]:
            right = SlotScores(Slot(0), 1, scores_of(1, 7))
            assert super().scores(worker_id, plan, sampled) == ((), (right,))
            return (), {
                "none": (),
                "short": (SlotScores(Slot(0), 1, scores_of(1, 3)),),
                "elsewhere": (SlotScores(Slot(0), 2, scores_of(2, 7)),),
                "unasked": (right, SlotScores(Slot(9), 1, scores_of(1, 1))),
            }[fault]

    world = Faulty(token_budget=8)
    world.arrive("a", prompt_len=8, max_tokens=2, sampling=Sampling(prompt_logprobs=NUM_TOP))
    world.finish_iteration()
    assert any(isinstance(effect, DismissWorker) for effect in world.effects)
