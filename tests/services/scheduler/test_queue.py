"""Who begins before whom when room is short, and what a newcomer is told about its wait."""

import pytest

from common.messages.requests import RequestRejected
from services.scheduler.events import RequestPreempted
from services.scheduler.placement import MAX_LOOK_PAST, MAX_OVERTAKEN
from services.scheduler.waiting import WaitingQueue
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
    for num_large, is_reached in ((MAX_LOOK_PAST, True), (MAX_LOOK_PAST + 1, False)):
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


def test_a_short_prompt_counts_only_what_is_read_before_it() -> None:
    """Long prompts wait to be read, at 320 tokens a second."""
    world = World(token_budget=16, num_blocks=2000, max_num_slots=64)
    for index in range(8):
        world.arrive(f"long {index}", prompt_len=800, max_tokens=2)
    for _ in range(10):
        world.finish_iteration(took_ns=50_000_000)
    world.arrive("long too", prompt_len=800, max_tokens=2, deadline_ms=1000.0)
    world.arrive("short", prompt_len=4, max_tokens=2, deadline_ms=1000.0)
    for _ in range(20):
        world.finish_iteration(took_ns=50_000_000)
    (refused,) = world.terminals["long too"]
    assert isinstance(refused, RequestRejected)
    assert "6 requests go before it" in refused.detail
    assert world.output["short"] == world.expected_output("short", 4, 2)


def test_a_short_prompt_waits_like_any_other_where_room_is_short() -> None:
    world = World(token_budget=64, num_blocks=64, max_num_slots=1)
    for index in range(6):
        world.arrive(f"other {index}", prompt_len=100, max_tokens=40)
    for _ in range(100):  # Two others begin, one after another: the queue has a pace.
        world.finish_iteration(took_ns=50_000_000)
    world.arrive("short", prompt_len=4, max_tokens=2, deadline_ms=1000.0)
    (refused,) = world.terminals["short"]
    assert isinstance(refused, RequestRejected)


@pytest.mark.parametrize(
    ("priority", "num_tokens", "num_places", "expected"),
    [
        (0, 5, 16, (0, 0)),  # All are longer.
        (0, 30, 16, (2, 80)),  # Two are no longer than it, read with half of the time.
        (0, 900, 16, (4, 360)),  # All are shorter: their sum, and no more.
        (0, 5, 3, (2, 80)),  # Two must begin before it is looked at, the shortest ones at best.
        (0, 30, 1, (4, 360)),  # In order.
        (1, 5, 16, (4, 360)),  # All are of a better priority.
        (-1, 900, 16, (0, 0)),  # None is.
    ],
)
def test_what_goes_before_a_newcomer(
    priority: int, num_tokens: int, num_places: int, expected: tuple[int, int]
) -> None:
    world = World(num_workers=0)
    for length in (100, 10, 220, 30):
        world.arrive(f"of {length}", prompt_len=length, max_tokens=2)
    queue = WaitingQueue()
    for request in world.core.open_requests:
        queue.add(request)
    ahead = queue.ahead_of(priority, num_tokens, num_places)
    assert (ahead.num_requests, ahead.num_tokens) == expected


def chunk_tokens(world: World, name: str) -> int:
    """How many tokens of its prompt were computed for a request."""
    return sum(chunk.num_tokens for plan in world.iterations for chunk in plan.chunks if chunk.request_id == name)


def test_requests_with_one_prompt_read_it_once() -> None:
    world = World(token_budget=64, num_blocks=400, max_num_slots=16)
    tokens = list(range(100, 500))
    for name in ("first", "second", "third"):
        world.arrive(name, prompt_len=400, tokens=tokens, max_tokens=3)
    world.arrive("other", prompt_len=20, max_tokens=3)
    world.arrive("apart", prompt_len=400, tokens=tokens, max_tokens=3, cache_salt="another's")
    world.drain()
    assert chunk_tokens(world, "first") == 400
    assert [chunk_tokens(world, name) for name in ("second", "third")] == [4, 4]  # The last block is their own.
    assert chunk_tokens(world, "apart") == 400
    assert began(world, "other") < began(world, "second")


def test_who_waits_for_a_prompt_that_is_read_begins_by_itself_when_its_reader_goes() -> None:
    world = World(token_budget=64, num_blocks=400)
    for name in ("first", "second"):
        world.arrive(name, prompt_len=400, tokens=list(range(100, 500)), max_tokens=3)
    world.finish_iteration()
    world.cancel("first")
    world.drain()
    assert world.output["second"] == world.expected_output("second", 400, 3)


def test_of_requests_with_one_prompt_a_newcomer_counts_one() -> None:
    world = World(num_workers=0)
    for index in range(5):
        world.arrive(f"twin {index}", prompt_len=200, tokens=list(range(200)), max_tokens=2)
    world.arrive("other", prompt_len=200, max_tokens=2)
    queue = WaitingQueue()
    for request in world.core.open_requests:
        queue.add(request)
    shared, apart = (queue.ahead_of(0, 300, 1, is_shared=is_shared) for is_shared in (True, False))
    assert (shared.num_requests, shared.num_tokens) == (2, 400)
    assert (apart.num_requests, apart.num_tokens) == (6, 1200)


def test_short_prompts_say_nothing_of_the_pace_at_which_long_ones_are_read() -> None:
    world = World(token_budget=64, num_blocks=400)
    world.arrive("long", prompt_len=640, max_tokens=1)
    for _ in range(10):
        world.finish_iteration(took_ns=50_000_000)
    pace = world.core.workers[0].prefill_tokens_per_s
    assert 1000 < pace < 1300  # 64 tokens in 51 ms.
    for index in range(60):
        world.arrive(f"short {index}", prompt_len=1, max_tokens=1)
        world.finish_iteration(took_ns=5_000_000)
    assert world.core.workers[0].prefill_tokens_per_s == pace


def test_a_quiet_hour_after_a_queue_that_emptied_by_itself_says_nothing_of_its_pace() -> None:
    world = World(token_budget=16, num_blocks=64, max_num_slots=1)
    for name in ("a", "b", "c"):
        world.arrive(name, prompt_len=8, max_tokens=4)
    while "b" not in world.output or not world.output["b"]:
        world.finish_iteration()  # It begins while another waits.
    world.cancel("c")
    world.drain()
    world.wait(3600)
    for name in ("d", "e", "f"):
        world.arrive(name, prompt_len=8, max_tokens=4)
    world.drain()
    for name in ("d", "e", "f"):
        assert world.output[name] == world.expected_output(name, 8, 4)


@pytest.mark.parametrize("depth", [1, 2])
def test_two_workers_with_nearly_as_much_to_read_do_not_leave_a_newcomer_to_each_other(depth: int) -> None:
    world = World(num_workers=2, token_budget=16, num_blocks=400, depth=depth)
    world.arrive("one", prompt_len=800, max_tokens=2)
    world.arrive("other", prompt_len=790, max_tokens=2)
    first, second = (worker.worker_id for worker in world.core.workers)
    world.arrive("short", prompt_len=4, max_tokens=2)
    for _ in range(10):
        for worker_id in (first, second):
            if world.plans[worker_id]:
                world.finish_iteration(worker_id)
    assert world.output["short"] == world.expected_output("short", 4, 2)


def test_an_urgent_request_does_not_wait_for_one_of_a_worse_priority_to_read_its_prompt() -> None:
    world = World(token_budget=16, num_blocks=1000)
    tokens = list(range(100, 900))
    world.arrive("reader", prompt_len=800, tokens=tokens, max_tokens=2, priority=5)
    world.finish_iteration()
    for index in range(3):  # Before them the reader would not come to its end soon.
        world.arrive(f"between {index}", prompt_len=700, max_tokens=2)
    world.arrive("urgent", prompt_len=800, tokens=tokens, max_tokens=2, priority=-5)
    for _ in range(140):  # At most half of each goes to others.
        world.finish_iteration()
    assert "urgent" in world.terminals


def test_prompts_share_no_floor() -> None:
    """Decodes leave no time at all: what is read all the same is read of one."""
    world = World(token_budget=None, num_blocks=2000, min_prefill_tokens=16, tbt_target_ns=1_000)
    world.arrive("stream", prompt_len=4, max_tokens=200)
    for _ in range(4):
        world.finish_iteration(took_ns=1_000_000)
    for name in ("one", "other"):
        world.arrive(name, prompt_len=500, max_tokens=2)
    for _ in range(6):
        world.finish_iteration(took_ns=1_000_000)
    plans = [plan for plan in world.iterations if plan.decodes and plan.chunks]
    assert plans
    assert {sum(chunk.num_tokens for chunk in plan.chunks) for plan in plans} == {16}


def test_a_block_is_published_no_further_than_tokens_are_known() -> None:
    world = World(block_size=1, num_blocks=64, depth=2)
    world.arrive("a", prompt_len=5, max_tokens=20)
    for _ in range(3):
        world.finish_iteration()
    world.cancel("a")
    while any(world.plans.values()):
        world.finish_iteration()
    world.check_drained()
