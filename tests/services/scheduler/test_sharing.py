"""Requests beside each other: prefixes shared, turns taken, room made, honest refusals."""

import pytest

from common.ids import WorkerId
from common.messages.requests import RequestEnded, RequestRejected
from services.scheduler.events import RequestPreempted
from tests.services.scheduler.world import World

PREFIX = list(range(5000, 5040))  # ten blocks of four


def ended(world: World, name: str) -> RequestEnded:
    (terminal,) = world.terminals[name]
    assert isinstance(terminal, RequestEnded)
    return terminal


def num_computed(world: World, name: str) -> int:
    return sum(chunk.num_tokens for plan in world.iterations for chunk in plan.chunks if chunk.request_id == name)


def test_a_prompt_that_was_read_before_is_not_read_again() -> None:
    world = World(token_budget=64)
    world.arrive("first", prompt_len=43, tokens=[*PREFIX, 1, 2, 3], max_tokens=2)
    world.drain()
    world.arrive("second", prompt_len=43, tokens=[*PREFIX, 4, 5, 6], max_tokens=2)
    world.drain()

    assert num_computed(world, "second") == 3
    assert ended(world, "first").num_cached_tokens == 0
    assert ended(world, "second").num_cached_tokens == 40
    assert world.output["second"] == world.expected_output("second", 43, 2)


def test_a_prefix_is_shared_while_both_run_and_its_blocks_are_held_until_the_last_ends() -> None:
    world = World(token_budget=64)
    world.arrive("first", prompt_len=41, tokens=[*PREFIX, 1], max_tokens=30)
    world.finish_iteration()
    world.arrive("second", prompt_len=41, tokens=[*PREFIX, 2], max_tokens=30)
    for _ in range(3):
        world.finish_iteration()
    first, second = (request.placed for request in world.core.workers[0].running)
    assert first.block_table[:10] == second.block_table[:10]
    world.cancel("first")
    world.drain()

    assert world.output["second"] == world.expected_output("second", 41, 30)
    world.check_drained()


def test_tenants_with_unlike_salts_share_nothing() -> None:
    world = World(token_budget=64)
    world.arrive("first", prompt_len=41, tokens=[*PREFIX, 1], max_tokens=2, cache_salt="a")
    world.drain()
    world.arrive("second", prompt_len=41, tokens=[*PREFIX, 1], max_tokens=2, cache_salt="b")
    world.drain()

    assert ended(world, "second").num_cached_tokens == 0


def test_the_last_token_of_a_known_prompt_is_computed_for_its_logits() -> None:
    world = World(token_budget=64)
    for name in ("first", "second"):
        world.arrive(name, prompt_len=40, tokens=PREFIX, max_tokens=2)
        world.drain()

    assert ended(world, "second").num_cached_tokens == 36
    assert world.output["second"] == world.expected_output("second", 40, 2)


def test_the_least_recently_used_prefix_is_forgotten_first() -> None:
    world = World(token_budget=64, num_blocks=24)
    for name, base in (("a", 0), ("b", 500)):
        world.arrive(name, prompt_len=41, tokens=[base + i for i in range(41)], max_tokens=1)
        world.drain()
    world.arrive("a again", prompt_len=41, tokens=list(range(41)), max_tokens=1)
    world.drain()
    assert ended(world, "a again").num_cached_tokens == 40
    world.arrive("c", prompt_len=41, tokens=[900 + i for i in range(41)], max_tokens=1)
    world.drain()
    world.arrive("a once more", prompt_len=41, tokens=list(range(41)), max_tokens=1)
    world.drain()
    assert ended(world, "a once more").num_cached_tokens == 40
    world.arrive("b again", prompt_len=41, tokens=[500 + i for i in range(41)], max_tokens=1)
    world.drain()
    assert ended(world, "b again").num_cached_tokens < 40


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    world = World(num_blocks=8, token_budget=16)
    world.arrive("old", prompt_len=8, max_tokens=16)
    world.arrive("new", prompt_len=8, max_tokens=16)
    world.drain()
    assert any(isinstance(effect, RequestPreempted) for effect in world.effects)
    assert world.output["new"] == world.expected_output("new", 8, 16)


def test_requests_go_where_their_prefix_is() -> None:
    world = World(num_workers=2, token_budget=64)
    world.arrive("filler", prompt_len=4, max_tokens=30)
    world.arrive("first", prompt_len=41, tokens=[*PREFIX, 1], max_tokens=2)
    while "first" not in world.terminals:
        for worker_id in [worker_id for worker_id, plans in world.plans.items() if plans]:
            world.finish_iteration(worker_id)
    holder = next(plan.worker_id for plan in world.iterations for c in plan.chunks if c.request_id == "first")
    world.arrive("second", prompt_len=41, tokens=[*PREFIX, 2], max_tokens=2)
    world.drain()
    where = next(plan.worker_id for plan in world.iterations for c in plan.chunks if c.request_id == "second")

    assert where == holder


def test_a_request_reads_its_prefix_again_elsewhere_when_prompts_keep_its_holder_busy_for_longer() -> None:
    world = World(num_workers=2, token_budget=64, num_blocks=512)
    world.arrive("first", prompt_len=41, tokens=[*PREFIX, 1], max_tokens=2)
    world.drain()
    (holder,) = {plan.worker_id for plan in world.iterations}
    world.arrive("document", prompt_len=1000)
    assert world.iterations[-1].worker_id == holder, "of two idle workers the first"
    world.arrive("second", prompt_len=41, tokens=[*PREFIX, 2], max_tokens=2)
    world.drain()

    assert ended(world, "second").num_cached_tokens == 0
    assert {p.worker_id for p in world.iterations for c in p.chunks if c.request_id == "second"} != {holder}


def test_who_waits_does_not_count_on_a_silent_worker_when_another_has_room() -> None:
    world = World(num_workers=2, token_budget=64)
    for name in ("a", "b", "c"):
        world.arrive(name, prompt_len=4, max_tokens=100)
    silent, busy = (worker.worker_id for worker in world.core.workers)
    for _ in range(4):
        world.finish_iteration(silent)
        world.finish_iteration(busy)
    if len(world.core.workers[0].running) > 1:
        silent, busy = busy, silent  # The emptier one.
    world.arrive("newcomer", prompt_len=4, max_tokens=3)
    for _ in range(20):
        world.finish_iteration(busy, took_ns=100_000_000)  # Two seconds in all; the other one says nothing.

    assert "newcomer" in world.terminals
    assert {plan.worker_id for plan in world.iterations for it in plan.chunks if it.request_id == "newcomer"} == {busy}
    world.arrive("later", prompt_len=4, max_tokens=3)
    world.finish_iteration(silent)  # It was slow, no more.
    assert {plan.worker_id for plan in world.iterations for it in plan.chunks if it.request_id == "later"} == {silent}
    world.drain()


def test_who_waits_for_a_silent_worker_begins_elsewhere_though_nothing_else_happens() -> None:
    world = World(num_workers=2, token_budget=64)
    world.arrive("first", prompt_len=41, tokens=[*PREFIX, 1], max_tokens=100)
    world.finish_iteration()
    world.finish_iteration()
    (silent,) = {plan.worker_id for plan in world.iterations}
    world.arrive("second", prompt_len=41, tokens=[*PREFIX, 2], max_tokens=2)
    assert world.core.num_waiting == 1, "for the one that has its prefix"
    world.wait(0.9)
    assert world.core.num_waiting == 1
    world.wait(0.9)
    assert world.core.num_waiting == 0
    assert world.iterations[-1].worker_id != silent
    world.drain()


def test_a_lone_worker_is_counted_on_whatever_it_does() -> None:
    world = World(token_budget=64)
    world.arrive("first", prompt_len=4, max_tokens=4)
    world.wait(10)
    world.arrive("second", prompt_len=4, max_tokens=4)
    world.drain()
    assert world.output["second"] == world.expected_output("second", 4, 4)


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    world = World(token_budget=16, num_blocks=256)
    world.arrive("long", prompt_len=800, max_tokens=2)
    world.finish_iteration()
    world.arrive("short", prompt_len=8, max_tokens=2)
    world.finish_iteration()

    assert world.finish_iteration() == {"long": 8, "short": 8}


def test_a_short_prompt_is_not_stuck_behind_one_that_fills_all_that_the_worker_takes() -> None:
    world = World(token_budget=None, tbt_target_ns=10**10, num_blocks=256, max_chunk_tokens=16)
    world.arrive("long", prompt_len=800, max_tokens=2)
    world.finish_iteration()
    world.arrive("short", prompt_len=8, max_tokens=2)
    world.finish_iteration()

    assert world.finish_iteration() == {"long": 8, "short": 8}
    assert world.core.workers[0].prefill_tokens_per_s > 0, "iterations full of prefill say how fast it is"


@pytest.mark.parametrize("num_short", [1, 5, 14])
def test_short_prompts_behind_a_long_one_are_read_within_the_stated_bound(num_short: int) -> None:
    world = World(token_budget=16, num_blocks=1024)
    world.arrive("long", prompt_len=2000, max_tokens=2)
    for index in range(num_short):
        world.arrive(f"short-{index}", prompt_len=16, max_tokens=1)
    world.finish_iteration()  # It was planned before they came.
    for _ in range(2 * num_short * 16 // 16):
        world.finish_iteration()

    assert set(world.terminals) == {f"short-{index}" for index in range(num_short)}


def test_a_long_prompt_takes_at_most_twice_as_long_beside_short_ones() -> None:
    world = World(token_budget=16, num_blocks=256, max_running=8)
    world.arrive("long", prompt_len=320, max_tokens=1)
    num_iterations = 0
    while "long" not in world.terminals:
        world.arrive(f"short-{num_iterations}", prompt_len=16, max_tokens=1)
        world.finish_iteration()
        num_iterations += 1

    assert num_iterations <= 2 * 320 / 16 + 2


def test_an_urgent_request_takes_the_place_of_one_of_lower_priority_and_the_effect_says_so() -> None:
    world = World(max_running=2, token_budget=32)
    world.arrive("standard", prompt_len=4, max_tokens=20, priority=0)
    world.arrive("batch", prompt_len=4, max_tokens=20, priority=5)
    world.finish_iteration()
    world.finish_iteration()
    world.arrive("urgent", prompt_len=4, max_tokens=4, priority=-5)
    world.drain()

    (preempted,) = [effect for effect in world.effects if isinstance(effect, RequestPreempted)]
    assert (preempted.request_id, preempted.for_request_id) == ("batch", "urgent")
    assert preempted.num_tokens >= 4
    assert next(iter(world.terminals)) == "urgent"
    assert world.output["batch"] == world.expected_output("batch", 4, 20)


def two_unlike_workers(num_blocks: int) -> tuple[World, WorkerId, WorkerId]:
    """One holds 256 tokens, the other num_blocks blocks of four, and on that one runs the worst-ranked request."""
    world = World(num_workers=1, token_budget=32, has_prefix_cache=False)
    other = world.join(num_blocks=num_blocks)
    world.arrive("standard", prompt_len=150, max_tokens=100, priority=4)
    large = world.iterations[-1].worker_id
    assert large != other
    return world, large, other


def preempted_for(world: World, name: str) -> list[str]:
    return [it.request_id for it in world.effects if isinstance(it, RequestPreempted) and it.for_request_id == name]


def test_an_urgent_request_takes_a_place_where_it_fits_though_a_worse_one_runs_where_it_does_not() -> None:
    world, _, _ = two_unlike_workers(num_blocks=20)
    world.arrive("batch", prompt_len=4, max_tokens=40, priority=5)
    world.arrive("urgent", prompt_len=150, max_tokens=20, priority=-5)
    world.drain()

    assert preempted_for(world, "urgent") == ["standard"]
    assert next(iter(world.terminals)) in ("urgent", "batch")
    for name, prompt_len, max_tokens in (("standard", 150, 100), ("batch", 4, 40), ("urgent", 150, 20)):
        assert world.output[name] == world.expected_output(name, prompt_len, max_tokens)


def test_nobody_gives_way_where_that_makes_no_room_for_the_urgent_one() -> None:
    world, large, other = two_unlike_workers(num_blocks=50)
    world.arrive("batch", prompt_len=4, max_tokens=60, priority=5)
    world.arrive("kept", prompt_len=120, max_tokens=60, priority=-6)
    for _ in range(8):
        for worker_id in (large, other):
            world.finish_iteration(worker_id)
    on_other = {request.request_id for request in world.core.workers[1].running}
    assert on_other == {"kept", "batch"}
    world.arrive("urgent", prompt_len=150, max_tokens=20, priority=-5)
    world.drain()

    assert preempted_for(world, "urgent") == ["standard"]


def test_one_that_no_worker_can_hold_keeps_no_urgent_one_waiting() -> None:
    world = World(num_workers=1, token_budget=64, max_running=1)
    world.arrive("stranded", prompt_len=150, max_tokens=20, priority=-9)
    for _ in range(4):
        world.finish_iteration()
    world.lose(next(iter(world.devices)))
    world.join(num_blocks=20)
    world.arrive("batch", prompt_len=4, max_tokens=60, priority=5)
    world.arrive("urgent", prompt_len=4, max_tokens=4, priority=-5)
    world.drain()

    assert preempted_for(world, "urgent") == ["batch"]
    assert list(world.terminals) == ["urgent", "batch"]


def test_equal_priority_never_preempts_for_a_place() -> None:
    world = World(max_running=1)
    world.arrive("first", prompt_len=4, max_tokens=8)
    world.arrive("second", prompt_len=4, max_tokens=8)
    world.drain()

    assert not any(isinstance(effect, RequestPreempted) for effect in world.effects)


def test_two_prompts_that_fit_only_one_after_the_other_both_finish() -> None:
    world = World(num_blocks=10, token_budget=8, depth=2)
    for name in "ab":
        world.arrive(name, prompt_len=30, max_tokens=8)
    world.drain()

    assert world.reason("a") == world.reason("b") == "length"


@pytest.mark.parametrize("max_preemptions", [0, 1, 2])
def test_nobody_is_preempted_more_often_than_stated(max_preemptions: int) -> None:
    world = World(num_blocks=16, token_budget=16, max_preemptions=max_preemptions, overcommit=10.0)
    for index in range(10):
        world.arrive(f"request-{index}", prompt_len=6, max_tokens=24)
    world.drain()

    counts: dict[str, int] = {}
    for effect in world.effects:
        if isinstance(effect, RequestPreempted):
            counts[effect.request_id] = counts.get(effect.request_id, 0) + 1
    assert max(counts.values(), default=0) <= max_preemptions
    assert all(world.reason(f"request-{index}") == "length" for index in range(10))


def test_expected_lengths_keep_requests_from_being_admitted_only_to_be_preempted() -> None:
    def num_preemptions(overcommit: float) -> int:
        world = World(num_blocks=24, token_budget=16, overcommit=overcommit, max_preemptions=100)
        for index in range(20):
            world.arrive(f"request-{index}", prompt_len=6, max_tokens=24)
        world.drain()
        return sum(isinstance(effect, RequestPreempted) for effect in world.effects)

    assert num_preemptions(1.0) < num_preemptions(10.0) / 2


def test_a_request_that_would_wait_longer_than_it_may_is_told_so_at_once() -> None:
    world = World(token_budget=8, max_running=1, num_blocks=256)
    for index in range(6):
        world.arrive(f"request-{index}", prompt_len=40, max_tokens=20)
    for _ in range(60):
        world.finish_iteration()  # A millisecond each.
    waiting = world.core.num_waiting
    assert waiting >= 2
    world.arrive("patient", prompt_len=4, deadline_ms=10_000)
    world.arrive("hasty", prompt_len=4, deadline_ms=5)

    assert "patient" not in world.terminals
    (rejected,) = world.terminals["hasty"]
    assert isinstance(rejected, RequestRejected)
    assert rejected.reason == "queue_full"
    assert f"{waiting + 1} requests" in rejected.detail
    assert rejected.retry_after_s is not None
    world.drain()
