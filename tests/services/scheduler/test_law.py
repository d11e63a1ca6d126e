"""From a target to a plan: margin, deadlines, chunk sizes."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost.load import Load
from services.scheduler.deadlines import choose_decodes
from services.scheduler.events import Bound, Decode
from services.scheduler.margin import Margin
from services.scheduler.policy.batch import Batch, Candidate, Room
from services.scheduler.request import Placement
from tests.services.scheduler.world import World

MS = 1_000_000


@pytest.mark.parametrize(
    "noise",
    [
        lambda rng: rng.gauss(0, 0.05),
        lambda rng: rng.uniform(-0.2, 0.2),
        lambda rng: rng.expovariate(20),
        lambda rng: 0.5 if rng.random() < 0.004 else 0.0,
    ],
    ids=["normal", "uniform", "exponential", "rare and large"],
)
@pytest.mark.parametrize("late_share", [0.01, 0.05])
def test_the_margin_holds_the_share_of_late_gaps_whatever_the_noise(
    noise: Callable[[random.Random], float], late_share: float
) -> None:
    rng = random.Random(7)
    target = 100.0 * MS
    margin = Margin(late_share, int(target))
    num_late = 0
    num_iterations = 20_000
    for _ in range(num_iterations):
        predicted = target - margin.ns
        is_late = predicted * (1 + noise(rng)) > target
        num_late += is_late
        margin.learn(float(is_late))
        assert margin.ns >= 0
    assert num_late / num_iterations <= 1.3 * late_share
    if noise(random.Random(1)) != 0.0:  # Rare and large noise may need no margin at all to keep a share of 5%.
        assert num_late / num_iterations >= 0.7 * late_share


def test_the_margin_learns_from_iterations_that_a_deadline_bound_and_from_no_others() -> None:
    world = World(token_budget=None, num_blocks=512, tbt_target_ns=300 * MS)
    world.arrive("stream", prompt_len=4, max_tokens=100)
    margin = world.core.workers[0].margin
    for _ in range(10):
        world.finish_iteration()
    assert margin.num_observed == 0, "in quiet hours nothing is late, and that is no credit"
    before_ns = margin.ns
    world.arrive("document", prompt_len=1500)
    for _ in range(3):
        world.finish_iteration()
    assert margin.num_observed > 0
    assert margin.ns < before_ns


def stream(slack_ms: float, context: int = 100) -> Placement:
    """A running stream whose next token is due in slack_ms."""
    world = World(token_budget=None)
    world.arrive("stream", prompt_len=4)
    (request,) = world.core.workers[0].running
    slot = request.placed.slot
    placement = Placement(world.core.workers[0], request, slot, 4, Decode(request.request_id, slot), frozenset())
    placement.num_planned = context
    placement.slack_ns = int(slack_ms * MS)
    request.order = stream_orders.pop()
    return placement


stream_orders = list(range(10_000, 0, -1))


def ten_ms_each(load: Load) -> float:
    return 10.0 * MS * load.num_tokens


def test_all_streams_run_when_that_is_in_time_for_the_tightest() -> None:
    streams = [stream(50), stream(1000)]
    decodes = choose_decodes(streams, ten_ms_each, margin_ns=5 * MS, allowance_ns=0, lost_ns=1000 * MS)
    assert decodes.placements == streams
    assert decodes.allowed_ns == 45 * MS


def test_a_stream_with_slack_sits_out_when_that_saves_another() -> None:
    hasty, patient, more_patient = stream(25), stream(500), stream(900)
    decodes = choose_decodes(
        [hasty, patient, more_patient], ten_ms_each, margin_ns=0, allowance_ns=0, lost_ns=1000 * MS
    )
    assert decodes.placements == [hasty, patient]
    assert decodes.allowed_ns == 25 * MS


def test_nobody_sits_out_when_it_saves_nobody() -> None:
    streams = [stream(5), stream(500)]
    assert choose_decodes(streams, ten_ms_each, margin_ns=0, allowance_ns=0, lost_ns=1000 * MS).placements == streams


def test_a_deadline_that_cannot_be_kept_no_longer_counts() -> None:
    late, in_time = stream(5), stream(25)
    decodes = choose_decodes([late, in_time], ten_ms_each, margin_ns=0, allowance_ns=0, lost_ns=1000 * MS)
    assert decodes.placements == [late, in_time]
    assert decodes.allowed_ns == 25 * MS


def test_a_patient_stream_gives_no_iteration_more_than_the_pools_target_when_others_are_late() -> None:
    late, patient = stream(5), stream(10_000)
    decodes = choose_decodes([late, patient], ten_ms_each, margin_ns=0, allowance_ns=0, lost_ns=100 * MS)
    assert decodes.placements == [late, patient]
    assert decodes.allowed_ns == 100 * MS


def test_a_stream_without_a_block_makes_nobody_sit_out() -> None:
    world = World(token_budget=None, num_blocks=12, has_prefix_cache=False, overcommit=10.0, tbt_target_ns=10_000 * MS)
    (worker,) = world.core.workers
    two_ms, three_ms = (worker.predict_ns(decodes_of(num_decodes)) / MS for num_decodes in (2, 3))
    world.arrive("patient", prompt_len=9, max_tokens=30)
    world.arrive("hasty", prompt_len=9, max_tokens=30, tbt_target_ms=2 * three_ms)
    world.arrive("tight", prompt_len=9, max_tokens=30, tbt_target_ms=(two_ms + three_ms) / 2)
    while not worker.in_flight[0].denied:
        world.finish_iteration(idle_ns=0)

    (flight,) = worker.in_flight
    assert [placement.request.request_id for placement in flight.denied] == ["tight"]
    assert [decode.request_id for decode in flight.plan.decodes] == ["patient", "hasty"]
    assert world.core.budget(worker, world.now_ns).num_decodes == 2


def decodes_of(num_decodes: int) -> Load:
    load = Load()
    load.add_decodes(num_decodes, 12 * num_decodes)
    return load


def test_an_iteration_leaves_half_of_its_time_to_a_stream_that_waits_for_a_block() -> None:
    world = World(token_budget=None, num_blocks=8, has_prefix_cache=False, overcommit=10.0, tbt_target_ns=10_000 * MS)
    (worker,) = world.core.workers
    world.arrive("patient", prompt_len=9, max_tokens=20)
    world.arrive("waiting", prompt_len=11, max_tokens=18, tbt_target_ms=300)
    while not worker.in_flight[0].denied:
        world.finish_iteration(idle_ns=0)

    (flight,) = worker.in_flight
    assert [placement.request.request_id for placement in flight.denied] == ["waiting"]
    assert flight.plan.allowed_ns is not None
    assert 75 * MS <= flight.plan.allowed_ns <= 150 * MS


def test_the_margin_takes_at_most_half_of_what_decodes_leave() -> None:
    decodes = choose_decodes([stream(50)], ten_ms_each, margin_ns=1000 * MS, allowance_ns=4 * MS, lost_ns=1000 * MS)
    assert decodes.allowed_ns == (50 - 4 - 18) * MS


def candidate(num_tokens: int) -> Candidate:
    world = World(token_budget=1)
    world.arrive("prompt", prompt_len=4)
    (request,) = world.core.workers[0].running
    return Candidate(request, None, 0, num_tokens)


@given(
    allowed_ms=st.integers(0, 3000),
    wanted=st.integers(1, 400),
    floor=st.integers(0, 8),
    num_decodes=st.integers(0, 20),
    max_tokens=st.integers(1, 300),
)
def test_a_chunk_is_the_largest_that_ends_in_time(
    allowed_ms: int, wanted: int, floor: int, num_decodes: int, max_tokens: int
) -> None:
    room = Room(
        max_tokens=max_tokens,
        max_batched_tokens=10**6,
        max_chunk_tokens=10**6,
        min_prefill_tokens=floor,
        tile_tokens=64,
        allowed_ns=float(allowed_ms * MS),
    )
    batch = Batch(ten_ms_each, room)
    batch.load.add_decodes(num_decodes, 0)
    got = batch.largest_chunk(candidate(wanted))

    in_time = max(0, min(wanted, max_tokens - num_decodes, allowed_ms // 10 - num_decodes))
    floor = min(floor, wanted)
    if in_time == 0:
        assert got == floor
        assert batch.bound is not Bound.NOTHING
    elif got < in_time:
        total = num_decodes + got
        assert total % 64 == 0, "only alignment takes something off"
        assert in_time - got < 64
    else:
        assert got == in_time
        assert (batch.bound is Bound.NOTHING) == (got == wanted)


def test_a_stream_with_a_tighter_target_gets_smaller_iterations_around_it() -> None:
    def largest_chunk_beside(tbt_target_ms: float) -> int:
        world = World(token_budget=None, num_blocks=512, tbt_target_ns=400 * MS)
        world.arrive("stream", prompt_len=4, max_tokens=100, tbt_target_ms=tbt_target_ms)
        world.finish_iteration()
        world.finish_iteration()
        world.arrive("document", prompt_len=1500)
        world.finish_iteration()
        return world.finish_iteration()["document"]

    tight, loose = largest_chunk_beside(60), largest_chunk_beside(300)
    assert 0 < tight < loose / 2


def test_on_a_device_without_tiles_a_chunk_takes_all_the_time_that_streams_leave() -> None:
    world = World(token_budget=None, num_blocks=512, tbt_target_ns=600 * MS)
    world.arrive("stream", prompt_len=4, max_tokens=100)
    world.finish_iteration()
    world.finish_iteration()
    world.arrive("document", prompt_len=1900)
    world.finish_iteration()
    plan = world.iterations[-1]
    assert plan.bound is Bound.DEADLINE
    assert plan.allowed_ns is not None
    assert plan.num_tokens % 64 != 0
    # One token more would not fit: an iteration of so many takes at most this much longer for each.
    assert plan.predicted_ns <= plan.allowed_ns < plan.predicted_ns * (plan.num_tokens + 1) / plan.num_tokens


def test_a_floor_keeps_prompts_moving_when_the_target_cannot_be_kept_and_says_so() -> None:
    world = World(token_budget=None, num_blocks=512, tbt_target_ns=1, min_prefill_tokens=8)
    world.arrive("stream", prompt_len=4, max_tokens=100)
    world.finish_iteration()
    world.finish_iteration()
    world.arrive("document", prompt_len=40)
    world.finish_iteration()
    assert world.finish_iteration() == {"stream": 1, "document": 8}
    assert world.iterations[-1].bound is Bound.FLOOR


def test_an_iteration_without_streams_keeps_to_one_target_so_that_a_newcomer_need_not_wait_longer() -> None:
    world = World(token_budget=None, num_blocks=512, tbt_target_ns=200 * MS)
    world.arrive("document", prompt_len=1900)
    plan = world.iterations[-1]
    assert plan.bound is Bound.TURN
    assert 100 * MS < plan.predicted_ns <= 200 * MS


def test_on_a_device_too_slow_for_its_target_an_iteration_without_streams_still_does_some_work() -> None:
    world = World(token_budget=None, num_blocks=512, tbt_target_ns=1 * MS)
    world.arrive("document", prompt_len=1900)
    plan = world.iterations[-1]
    assert plan.bound is Bound.TURN
    assert plan.num_tokens > 32
