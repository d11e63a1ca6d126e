"""Who begins before whom when room is short, and what a newcomer is told about its wait."""

import pytest

from common.messages.requests import RequestRejected
from services.scheduler.events import RequestPreempted
from services.scheduler.placement import MAX_LOOK_PAST, MAX_OVERTAKEN
from tests.services.scheduler.world import World


def began(world: World, name: str, start: int = 0) -> int:
    """The first iteration, from start on, that computed a chunk of the request; beyond all if none did."""
    for number, plan in enumerate(world.iterations):
        if number >= start and any(chunk.request_id == name for chunk in plan.chunks):
            return number
    return len(world.iterations)


def full_world() -> World:
    """Room for 256 tokens, of which a request that runs for long holds 150 and more: too few are left for another."""
    world = World(token_budget=64, num_blocks=64)
    world.arrive("old", prompt_len=150, max_tokens=60)
    for _ in range(4):
        world.finish_iteration()
    world.arrive("large", prompt_len=150, max_tokens=4)
    return world


def test_what_needs_little_does_not_wait_for_the_room_that_another_needs() -> None:
    world = full_world()
    world.arrive("short", prompt_len=4, max_tokens=2)
    for _ in range(3):
        world.finish_iteration()
    assert "short" in world.terminals
    assert "old" not in world.terminals
    world.drain()
    assert world.output["large"] == world.expected_output("large", 150, 4)
    assert world.output["short"] == world.expected_output("short", 4, 2)


def test_it_is_overtaken_a_bounded_number_of_times() -> None:
    world = full_world()
    names = [f"short {index}" for index in range(2 * MAX_OVERTAKEN)]
    for name in names:
        world.arrive(name, prompt_len=4, max_tokens=2)
        world.finish_iteration()
    world.drain()
    large = began(world, "large")
    before = [name for name in names if began(world, name) < large]
    assert before == names[:MAX_OVERTAKEN]


def test_a_plan_looks_past_a_bounded_number_of_requests_without_room() -> None:
    for num_large, is_reached in ((MAX_LOOK_PAST - 1, True), (MAX_LOOK_PAST, False)):
        world = full_world()
        for index in range(num_large - 1):  # Beside the first.
            world.arrive(f"large {index}", prompt_len=150, max_tokens=4)
        world.arrive("short", prompt_len=4, max_tokens=2)
        for _ in range(3):
            world.finish_iteration()
        assert ("short" in world.terminals) is is_reached


def test_nobody_passes_one_of_a_better_priority() -> None:
    world = World(token_budget=64, num_blocks=64)
    world.arrive("old", prompt_len=150, max_tokens=60, priority=-2)
    for _ in range(4):
        world.finish_iteration()
    world.arrive("large", prompt_len=150, max_tokens=4, priority=-1)
    world.arrive("short", prompt_len=4, max_tokens=2)
    world.drain()
    assert began(world, "large") <= began(world, "short")


def test_nobody_passes_one_whose_stream_has_begun() -> None:
    world = World(num_blocks=8, token_budget=16)
    world.arrive("old", prompt_len=8, max_tokens=20)
    world.arrive("new", prompt_len=8, max_tokens=16)
    while not (preempted := [effect for effect in world.effects if isinstance(effect, RequestPreempted)]):
        world.finish_iteration()
    assert [effect.request_id for effect in preempted] == ["new"]
    num_before = len(world.iterations)
    world.arrive("short", prompt_len=1, max_tokens=1)
    world.drain()
    assert began(world, "new", num_before) <= began(world, "short", num_before) < len(world.iterations)
    assert world.output["new"] == world.expected_output("new", 8, 16)


@pytest.mark.parametrize(("priority", "is_refused"), [(0, True), (5, True), (-1, False)])
def test_only_those_that_go_before_it_count_for_a_newcomers_wait(priority: int, is_refused: bool) -> None:
    world = World(token_budget=16, num_blocks=256, max_num_slots=2)
    for index in range(6):
        world.arrive(f"other {index}", prompt_len=100, max_tokens=40)
    for _ in range(60):  # Two others begin, one after another: the queue has a pace.
        world.now_ns += 50_000_000
        world.finish_iteration()
    world.arrive("new", prompt_len=4, max_tokens=2, priority=priority, deadline_ms=20.0)
    refused = [it for it in world.terminals.get("new", []) if isinstance(it, RequestRejected)]
    assert bool(refused) is is_refused
    if refused:
        assert "go before it" in refused[0].detail
        assert refused[0].retry_after_s is not None
