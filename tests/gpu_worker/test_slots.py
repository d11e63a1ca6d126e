"""Plans applied to slots: the order of their parts, and the refusal of each thing that a plan may get wrong."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import BlockId, RequestId, Slot, pack_ids
from common.messages.plans import GrownTable, NewRequest, Plan, PlanChunk, PlanRefused
from common.messages.requests import Sampling
from gpu_worker.slots import Iteration, Limits, PlanState

LIMITS = Limits(vocab_size=100, max_model_len=40, block_size=4, num_blocks=16, max_num_slots=4, max_chunk_tokens=24)


def new(slot: int, num_tokens: int = 6, blocks: Sequence[int] = (0, 1), **changes: Any) -> NewRequest:
    fields: dict[str, Any] = {
        "slot": Slot(slot),
        "request_id": RequestId(f"r{slot}"),
        "token_ids": pack_ids(range(num_tokens)),
        "num_prompt_tokens": num_tokens,
        "seed": 0,
        "sampling": Sampling(),
        "block_table": pack_ids(blocks),
        **changes,
    }
    return NewRequest(**fields)


def chunk(slot: int, start: int, num_tokens: int, is_sampled: bool = False) -> PlanChunk:
    return PlanChunk(Slot(slot), start, num_tokens, is_sampled)


def slots(*numbers: int) -> tuple[Slot, ...]:
    return tuple(Slot(number) for number in numbers)


class Plans:
    """Applies plans of one epoch, numbered in order."""

    def __init__(self, epoch: int = 1) -> None:
        self.state = PlanState(LIMITS)
        self.epoch = epoch
        self._next_iteration = 0

    def apply(self, **parts: Any) -> list[tuple[int, int, int, bool]]:
        """Apply a plan that is right; return its rows as (slot, start, num_tokens, is_sampled)."""
        applied = self._apply(parts)
        assert isinstance(applied, Iteration), applied
        return [(row.resident.slot, row.start, row.num_tokens, row.is_sampled) for row in applied.rows]

    def refused(self, **parts: Any) -> str:
        """Apply a plan that is wrong; return the refusal's detail."""
        applied = self._apply(parts)
        assert isinstance(applied, PlanRefused), applied
        assert (applied.epoch, applied.iteration) == (self.epoch, self._next_iteration - 1)
        return applied.detail

    def _apply(self, parts: dict[str, Any]) -> Iteration | PlanRefused | None:
        plan = Plan(epoch=self.epoch, iteration=self._next_iteration, **parts)
        self._next_iteration += 1
        return self.state.apply(plan)


def decoding() -> Plans:
    """Slots 0 and 1, whose prompts of 6 are computed; 1 was added to the decode set before 0."""
    plans = Plans()
    plans.apply(
        introduced=(new(0), new(1, blocks=(2, 3))),
        chunks=(chunk(0, 0, 6, is_sampled=True), chunk(1, 0, 6, is_sampled=True)),
    )
    assert plans.apply(decode_added=slots(1, 0)) == [(1, 6, 1, True), (0, 6, 1, True)]
    return plans


def test_a_steady_decode_batch_is_an_empty_plan() -> None:
    assert decoding().apply() == [(1, 7, 1, True), (0, 7, 1, True)]


def test_decodes_come_before_chunks() -> None:
    rows = decoding().apply(introduced=(new(2, blocks=(4, 5)),), chunks=(chunk(2, 0, 5),))
    assert rows == [(1, 7, 1, True), (0, 7, 1, True), (2, 0, 5, False)]


def test_a_released_slot_leaves_the_decode_set_and_may_be_introduced_by_the_same_plan() -> None:
    plans = decoding()
    assert plans.apply(released=slots(1), introduced=(new(1),), chunks=(chunk(1, 0, 3),)) == [
        (0, 7, 1, True),
        (1, 0, 3, False),
    ]
    assert plans.state.num_slots_in_use == 2


def test_a_slot_may_leave_the_decode_set_and_return_at_its_end_in_one_plan() -> None:
    assert decoding().apply(decode_removed=slots(1), decode_added=slots(1)) == [(0, 7, 1, True), (1, 7, 1, True)]


def test_a_table_grows_before_the_rows_that_need_it() -> None:
    too_short, grown = decoding(), decoding()
    for plans in (too_short, grown):
        plans.apply()  # Both requests have 8 tokens computed now, which fill their blocks.
    assert too_short.refused() == "slot 1: its blocks hold 8 tokens, [8, 9) end past them"
    more = (GrownTable(Slot(1), (BlockId(8),)), GrownTable(Slot(0), (BlockId(9),)))
    assert grown.apply(grown=more) == [(1, 8, 1, True), (0, 8, 1, True)]


def test_a_prefix_that_is_in_the_cache_need_not_be_computed() -> None:
    plans = Plans()
    assert plans.apply(introduced=(new(0),), chunks=(chunk(0, 4, 2, is_sampled=True),)) == [(0, 4, 2, True)]


def test_a_request_with_all_but_its_last_token_in_the_cache_may_decode_at_once() -> None:
    plans = Plans(epoch=2)
    assert plans.apply(introduced=(new(0),), decode_added=slots(0)) == [(0, 5, 1, True)]


def test_a_chunk_of_one_token_at_the_end_is_a_decode() -> None:
    plans = Plans()
    plans.apply(introduced=(new(0),), chunks=(chunk(0, 0, 6, is_sampled=True),))
    assert plans.apply(chunks=(chunk(0, 6, 1, is_sampled=True),)) == [(0, 6, 1, True)]


@pytest.mark.parametrize(
    ("parts", "detail"),
    [
        ({"released": slots(3)}, "slot 3 is released, but not in use"),
        ({"grown": (GrownTable(Slot(3), (BlockId(1),)),)}, "slot 3 is grown, but not in use"),
        ({"grown": (GrownTable(Slot(0), (BlockId(16),)),)}, "slot 0 has a block outside the pool of 16"),
        ({"grown": (GrownTable(Slot(0), (BlockId(-1),)),)}, "slot 0 has a block outside the pool of 16"),
        ({"decode_removed": slots(3)}, "slot 3 is removed from the decode set, where it is not"),
        ({"decode_added": slots(3)}, "slot 3 is added to the decode set, but not in use"),
        ({"decode_added": slots(0)}, "slot 0 is added to the decode set, where it is already"),
        ({"chunks": (chunk(3, 0, 1),)}, "slot 3 is given a chunk, but not in use"),
        (
            {"grown": (GrownTable(Slot(0), (BlockId(9),)),), "chunks": (chunk(0, 8, 1),)},
            "a slot has two rows in one iteration",
        ),
        ({"introduced": (new(0),)}, "slot 0 is introduced while it is in use"),
        ({"introduced": (new(4),)}, "slot 4 is not below 4"),
        ({"introduced": (new(-1),)}, "slot -1 is not below 4"),
        ({"introduced": (new(2, blocks=(16,)),)}, "slot 2 has a block outside the pool of 16"),
        ({"introduced": (new(2, token_ids=b"12345"),)}, "slot 2: bytes length not a multiple of item size"),
        ({"introduced": (new(2, token_ids=pack_ids([100] * 6)),)}, "a token id outside the vocabulary of 100"),
        ({"introduced": (new(2, token_ids=pack_ids([-1] * 6)),)}, "a token id outside the vocabulary of 100"),
        ({"introduced": (new(2, 41),)}, "slot 2 has 41 tokens, 41 of them prompt; this model takes 1 to 40"),
        ({"introduced": (new(2, 0),)}, "slot 2 has 0 tokens, 0 of them prompt"),
        ({"introduced": (new(2, 6, num_prompt_tokens=7),)}, "slot 2 has 6 tokens, 7 of them prompt"),
        (
            {"introduced": (new(2, 30, blocks=range(4, 12)),), "chunks": (chunk(2, 0, 23),)},
            "the iteration has 25 tokens; this worker computes at most 24",
        ),
        ({"introduced": (new(2),), "chunks": (chunk(2, 0, 7),)}, "tokens [0, 7) are not among the 6 known"),
        ({"introduced": (new(2),), "chunks": (chunk(2, -1, 2),)}, "tokens [-1, 1) are not among the 6 known"),
        ({"introduced": (new(2),), "chunks": (chunk(2, 0, 0),)}, "tokens [0, 0) are not among the 6 known"),
        (
            {"introduced": (new(2),), "chunks": (chunk(2, 0, 5, is_sampled=True),)},
            "slot 2: sampled after token 4, while 6 are known",
        ),
        ({"introduced": (new(2, blocks=(4,)),), "chunks": (chunk(2, 0, 5),)}, "its blocks hold 4 tokens, [0, 5) end"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_a_plan_that_cannot_be_applied_is_refused_with_the_reason(parts: dict[str, Any], detail: str) -> None:
    assert detail in decoding().refused(**parts)


@pytest.mark.parametrize("start", [2, 4])
def test_chunks_follow_one_another(start: int) -> None:
    plans = Plans()
    plans.apply(introduced=(new(0),), chunks=(chunk(0, 0, 3),))
    detail = plans.refused(chunks=(chunk(0, start, 1),))
    assert detail == f"slot 0: tokens [{start}, {start + 1}) do not follow the 3 computed"


def test_a_slot_whose_prompt_is_not_computed_cannot_decode() -> None:
    plans = Plans()
    plans.apply(introduced=(new(0),), chunks=(chunk(0, 0, 3),))
    assert plans.refused(decode_added=slots(0)) == "slot 0: tokens [5, 6) do not follow the 3 computed"


def test_nothing_is_computed_beyond_the_context() -> None:
    plans = Plans()
    plans.apply(introduced=(new(0, 40, blocks=range(11)),), decode_added=slots(0))
    assert plans.refused() == "slot 0: position 40 is beyond the context"


def test_a_gap_in_the_sequence_is_refused_and_the_rest_of_the_epoch_is_ignored() -> None:
    state = PlanState(LIMITS)
    first = Plan(epoch=3, iteration=0, introduced=(new(0),), chunks=(chunk(0, 0, 2),))
    assert isinstance(state.apply(first), Iteration)
    gap = state.apply(Plan(epoch=3, iteration=2))
    assert gap == PlanRefused(epoch=3, iteration=2, detail="iteration 2 came where 1 was due")
    assert state.num_slots_in_use == 0
    assert state.apply(Plan(epoch=3, iteration=1)) is None
    assert state.apply(Plan(epoch=3, iteration=3)) is None


def test_an_epoch_begins_from_nothing_and_at_0() -> None:
    state = PlanState(LIMITS)
    first = Plan(epoch=3, iteration=0, introduced=(new(0),), decode_added=slots(0))
    assert isinstance(state.apply(first), Iteration)
    fresh = state.apply(Plan(epoch=4, iteration=0))
    assert fresh == Iteration(4, 0, ())
    assert state.num_slots_in_use == 0
    late = state.apply(Plan(epoch=5, iteration=1))
    assert late == PlanRefused(epoch=5, iteration=1, detail="iteration 1 came where 0 was due")


def test_plans_of_an_older_epoch_are_ignored_and_a_refused_one_can_be_followed() -> None:
    state = PlanState(LIMITS)
    assert isinstance(state.apply(Plan(epoch=3, iteration=0, released=slots(0))), PlanRefused)
    assert isinstance(state.apply(Plan(epoch=4, iteration=0)), Iteration)
    assert state.apply(Plan(epoch=3, iteration=1)) is None
    assert isinstance(state.apply(Plan(epoch=4, iteration=1)), Iteration)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_right_plans_are_applied_row_for_row_and_wrong_ones_never_raise(data: st.DataObject) -> None:
    """Random deltas against a plain model of what a slot knows; what the model calls wrong must be refused."""
    plans = Plans()
    known: dict[int, list[int]] = {}  # slot: [tokens known, computed]
    decode_order: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        released = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=1)) if known else []
        for slot in released:
            del known[slot]
        decode_order = [slot for slot in decode_order if slot not in released]
        free = [slot for slot in range(4) if slot not in known]
        introduced = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []
        for slot in introduced:
            known[slot] = [6, 0]
        ready = [slot for slot in known if known[slot][1] == known[slot][0] - 1 and slot not in decode_order]
        added = data.draw(st.permutations(ready))[: data.draw(st.integers(0, 2))]
        decode_order += added
        expected = []
        for slot in decode_order:
            expected.append((slot, known[slot][1], 1, True))
            known[slot] = [known[slot][0] + 1, known[slot][1] + 1]
        chunks = []
        for slot in data.draw(st.permutations([slot for slot in known if slot not in decode_order])):
            left = known[slot][0] - known[slot][1]
            if left and (count := data.draw(st.integers(0, left))):
                is_sampled = count == left
                chunks.append(chunk(slot, known[slot][1], count, is_sampled))
                expected.append((slot, known[slot][1], count, is_sampled))
                known[slot] = [known[slot][0] + is_sampled, known[slot][1] + count]
        parts = {
            "released": slots(*released),
            "introduced": tuple(new(slot, blocks=range(4)) for slot in introduced),
            "decode_added": slots(*added),
            "chunks": tuple(chunks),
        }
        assert plans.apply(**parts) == expected
    wrong = data.draw(st.sampled_from([slot for slot in range(-1, 6) if slot not in known]))
    assert f"slot {wrong} " in plans.refused(chunks=(chunk(wrong, 0, 1),))
