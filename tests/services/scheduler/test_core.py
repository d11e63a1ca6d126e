"""The scheduler core, one situation a test."""

import pytest

from common.ids import InstanceId, TokenizerId, WorkerId
from common.messages.plans import PlanRefused
from common.messages.requests import RequestRejected, Sampling
from services.scheduler.events import DismissWorker, RequestPreempted, WorkerReported
from services.scheduler.policy import POLICIES
from tests.services.scheduler.world import World, token_at


def test_a_long_prompt_gets_only_the_budget_that_decodes_leave() -> None:
    world = World(token_budget=8)
    world.arrive("chat", prompt_len=4)
    world.arrive("document", prompt_len=100)
    world.finish_iteration()  # chat's prefill is done; now both compete

    assert world.finish_iteration() == {"chat": 1, "document": 7}


def test_decodes_beyond_the_budget_all_run_and_prefill_still_gets_its_floor() -> None:
    world = World(token_budget=3, min_prefill_tokens=2)
    for name in "abcd":
        world.arrive(name, prompt_len=1, max_tokens=100)
    for _ in range(4):
        world.finish_iteration()
    world.arrive("late", prompt_len=10)
    world.finish_iteration()

    assert world.finish_iteration() == {"a": 1, "b": 1, "c": 1, "d": 1, "late": 2}


@pytest.mark.parametrize("token_budget", [None, 4, 64])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_plan_has_more_tokens_than_the_worker_takes(policy: str, token_budget: int | None) -> None:
    """FakeDevice checks it, as workers do; here a prompt is as long as an iteration may be, and streams run beside."""
    world = World(
        policy=policy,
        token_budget=token_budget,
        tbt_target_ns=1_000,
        min_prefill_tokens=16,
        num_blocks=256,
        max_num_slots=8,
        max_chunk_tokens=10,
        depth=2,
    )
    prompt_lens = {name: 10 if index % 2 else 30 for index, name in enumerate("abcdefgh")}
    for name, prompt_len in prompt_lens.items():
        world.arrive(name, prompt_len=prompt_len, max_tokens=60)
        for _ in range(6):
            world.finish_iteration()
    world.drain()
    assert max(plan.num_tokens for plan in world.iterations) <= 10
    for name, prompt_len in prompt_lens.items():
        assert world.output[name] == world.expected_output(name, prompt_len, 60)


def test_a_steady_decode_batch_is_an_empty_plan() -> None:
    world = World(token_budget=64, block_size=64)
    for name in "abc":
        world.arrive(name, prompt_len=5, max_tokens=50)
    world.finish_iteration()
    world.finish_iteration()
    world.finish_iteration()
    (plan,) = world.plans[next(iter(world.plans))]
    assert (plan.chunks, plan.introduced, plan.grown, plan.decode_added, plan.decode_removed) == ((), (), (), (), ())

    assert world.finish_iteration() == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize("depth", [1, 2])
def test_each_request_gets_its_tokens_in_order_and_one_end(depth: int) -> None:
    world = World(depth=depth)
    world.arrive("a", prompt_len=13, max_tokens=5)
    world.arrive("b", prompt_len=1, max_tokens=9)
    world.drain()

    assert world.output["a"] == world.expected_output("a", 13, 5)
    assert world.output["b"] == world.expected_output("b", 1, 9)
    assert (world.reason("a"), world.reason("b")) == ("length", "length")
    world.check_drained()


def test_with_depth_two_the_next_plan_leaves_before_the_result_is_back() -> None:
    world = World(depth=2)
    world.arrive("a", prompt_len=4, max_tokens=5)
    (plans,) = world.plans.values()
    assert len(plans) == 2

    world.finish_iteration()
    assert len(plans) == 2


def test_a_stop_id_ends_a_request_and_its_row_in_flight_is_dropped() -> None:
    world = World(depth=2)
    third = token_at("a", 4 + 2)
    world.arrive("a", prompt_len=4, max_tokens=50, sampling=Sampling(temperature=0, stop_token_ids=(third,)))
    world.drain()

    assert world.output["a"] == world.expected_output("a", 4, 3)
    (ended,) = world.terminals["a"]
    assert (ended.reason, getattr(ended, "stop", None)) == ("stop", third)
    world.check_drained()


def test_max_tokens_wastes_no_row() -> None:
    world = World(depth=2)
    world.arrive("a", prompt_len=4, max_tokens=3)
    world.drain()

    assert sum(len(plan.decodes) + len(plan.chunks) for plan in world.iterations) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cancelled_request_frees_its_blocks_when_its_plans_have_returned(depth: int) -> None:
    world = World(depth=depth)
    world.arrive("a", prompt_len=30, max_tokens=50)
    world.finish_iteration()
    world.cancel("a")
    assert world.reason("a") == "cancelled"
    assert world.core.workers[0].pool.num_free < 64, "a plan in flight may still write there"
    for _ in range(depth):
        world.finish_iteration()

    world.check_drained()
    assert not any(world.plans.values())


def test_a_waiting_request_can_be_cancelled() -> None:
    world = World(max_running=1)
    world.arrive("a", prompt_len=4)
    world.arrive("b", prompt_len=4)
    world.cancel("b")
    world.drain()

    assert world.reason("b") == "cancelled"
    assert world.output["b"] == []


def test_a_request_stopped_by_its_tokenizer_is_told_no_second_end() -> None:
    world = World(depth=2)
    world.arrive("a", prompt_len=4, max_tokens=50)
    world.finish_iteration()
    world.stop("a", num_output_tokens=1)
    world.drain()

    assert "a" not in world.terminals
    world.check_drained()


def test_a_lost_tokenizer_takes_its_requests_with_it_and_no_others() -> None:
    world = World(token_budget=32)
    other = TokenizerId(InstanceId("tokenizer-1"))
    world.arrive("a", prompt_len=4, max_tokens=50)
    world.arrive("b", prompt_len=4, max_tokens=3, tokenizer_id=other)
    world.finish_iteration()
    world.lose_tokenizer()
    world.drain()

    assert "a" not in world.terminals
    assert world.reason("b") == "length"
    world.check_drained()


@pytest.mark.parametrize("depth", [1, 2])
def test_when_blocks_run_out_the_newest_request_is_preempted_and_recomputed(depth: int) -> None:
    world = World(depth=depth, num_blocks=8, token_budget=16)  # 32 tokens
    world.arrive("old", prompt_len=8, max_tokens=16)
    world.arrive("new", prompt_len=8, max_tokens=16)
    world.drain()

    preempted = [effect for effect in world.effects if isinstance(effect, RequestPreempted)]
    assert [effect.request_id for effect in preempted] == ["new"]
    assert world.output["old"] == world.expected_output("old", 8, 16)
    assert world.output["new"] == world.expected_output("new", 8, 16)
    world.check_drained()


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_requests_give_way_than_blocks_are_needed(depth: int) -> None:
    world = World(depth=depth, num_blocks=16, token_budget=64, overcommit=10.0, has_prefix_cache=False)
    for name, prompt_len in (("a", 12), ("b", 11), ("c", 10), ("d", 9)):  # Each needs a block when no other does.
        world.arrive(name, prompt_len=prompt_len, max_tokens=20)
    while not (preempted := [effect for effect in world.effects if isinstance(effect, RequestPreempted)]):
        world.finish_iteration()

    assert [effect.request_id for effect in preempted] == ["d"]
    all_stream = next(number for number, plan in enumerate(world.iterations) if len(plan.decodes) == 4)
    assert all(len(plan.decodes) >= 3 for plan in world.iterations[all_stream:])


def test_nobody_gives_way_to_one_that_came_later() -> None:
    world = World(num_blocks=16, token_budget=64, overcommit=10.0, has_prefix_cache=False)
    for name, prompt_len in (("a", 9), ("b", 10), ("c", 11), ("d", 12)):  # The last one needs a block first.
        world.arrive(name, prompt_len=prompt_len, max_tokens=20)
    world.drain()

    preempted = [effect for effect in world.effects if isinstance(effect, RequestPreempted)]
    assert preempted
    assert all(effect.request_id > effect.for_request_id for effect in preempted)
    for name, prompt_len in (("a", 9), ("b", 10), ("c", 11), ("d", 12)):
        assert world.output[name] == world.expected_output(name, prompt_len, 20)


def test_a_request_that_fills_the_whole_pool_runs() -> None:
    world = World(num_blocks=4)  # 16 tokens
    world.arrive("full", prompt_len=10, max_tokens=7)  # its last token needs no KV
    world.arrive("all prompt", prompt_len=16, max_tokens=1)
    world.drain()

    assert world.output["full"] == world.expected_output("full", 10, 7)
    assert world.reason("all prompt") == "length"


def test_a_request_that_can_never_fit_is_refused_with_the_numbers_and_blocks_nobody() -> None:
    world = World(num_blocks=4)
    world.arrive("huge", prompt_len=15, max_tokens=3)
    world.arrive("small", prompt_len=4, max_tokens=2)
    world.drain()

    (rejected,) = world.terminals["huge"]
    assert isinstance(rejected, RequestRejected)
    assert rejected.reason == "too_large"
    for number in ("15", "3", "17", "16"):
        assert number in rejected.detail
    assert world.reason("small") == "length"


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    world = World(max_running=1, max_waiting=2)
    for name in "abcd":
        world.arrive(name, prompt_len=4, max_tokens=4)

    (rejected,) = world.terminals["d"]
    assert isinstance(rejected, RequestRejected)
    assert rejected.reason == "queue_full"
    assert rejected.retry_after_s is not None
    world.drain()
    assert all(world.reason(name) == "length" for name in "abc")


def test_a_request_that_waits_too_long_is_refused() -> None:
    world = World(max_running=1, queue_timeout_ns=2_000_000_000, plan_timeout_ns=10**12)
    world.arrive("a", prompt_len=4, max_tokens=4)
    world.arrive("b", prompt_len=4, max_tokens=4)
    world.arrive("hasty", prompt_len=4, max_tokens=4, deadline_ms=500)
    world.wait(1)
    assert set(world.terminals) == {"hasty"}
    world.wait(1.5)

    assert world.reason("b") == "queue_timeout"
    world.drain()
    assert world.reason("a") == "length"


def test_without_workers_requests_wait_and_then_are_unavailable() -> None:
    world = World(num_workers=0)
    world.arrive("early", prompt_len=4, max_tokens=2)
    world.wait(30)
    world.join()
    world.drain()
    assert world.reason("early") == "length"

    world.lose(next(iter(world.devices)))
    world.arrive("late", prompt_len=4, max_tokens=2)
    world.wait(61)
    assert world.reason("late") == "unavailable"


def test_two_workers_share_one_queue() -> None:
    world = World(num_workers=2)
    for name in "abcd":
        world.arrive(name, prompt_len=6, max_tokens=4)
    running = [len(worker.running) for worker in world.core.workers]
    while sum(running) < 4:
        for worker_id in list(world.plans):
            world.finish_iteration(worker_id)
        running = [len(worker.running) for worker in world.core.workers]

    assert running == [2, 2]
    world.drain()
    assert all(world.reason(name) == "length" for name in "abcd")


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_of_a_lost_worker_go_on_elsewhere_with_no_token_twice(depth: int) -> None:
    world = World(num_workers=2, depth=depth)
    for name in "abcd":
        world.arrive(name, prompt_len=6, max_tokens=20)
    for _ in range(12):
        world.finish_iteration()
    world.lose(next(iter(world.devices)))
    world.drain()

    for name in "abcd":
        assert world.output[name] == world.expected_output(name, 6, 20)
        assert world.reason(name) == "length"


def test_a_request_that_takes_its_workers_down_fails_alone() -> None:
    world = World(num_workers=1, max_losses=2)
    world.arrive("deadly", prompt_len=6, max_tokens=20)
    world.lose(next(iter(world.devices)))
    second = world.join()
    world.arrive("harmless", prompt_len=6, max_tokens=2)
    world.lose(second)
    world.join()
    world.drain()

    assert world.reason("deadly") == "error"
    assert world.reason("harmless") == "length"


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_stream_that_no_worker_can_hold_any_more_ends_after_a_while(is_preempted: bool) -> None:
    world = World(token_budget=64, max_running=1, num_blocks=16, plan_timeout_ns=10**12)
    world.arrive("large", prompt_len=40, max_tokens=20)
    for _ in range(5):
        world.finish_iteration()
    if is_preempted:
        world.arrive("urgent", prompt_len=4, max_tokens=40, priority=-1)
        world.finish_iteration()
    world.wait(100)
    world.lose(next(iter(world.devices)))
    world.wait(50)
    world.join(num_blocks=12)
    world.drain()
    assert "large" not in world.terminals, "a larger one may come"
    world.wait(11)
    assert world.reason("large") == "error"
    assert world.core.num_open == 0


def test_a_stream_that_lost_its_worker_waits_for_another_no_longer_than_newcomers_do() -> None:
    world = World(token_budget=64)
    world.arrive("a", prompt_len=4, max_tokens=20)
    for _ in range(3):
        world.finish_iteration()
    world.lose(next(iter(world.devices)))
    world.wait(59)
    assert "a" not in world.terminals
    world.wait(2)
    assert world.reason("a") == "error"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_refused_plan_opens_a_new_epoch_and_nothing_is_lost(depth: int) -> None:
    world = World(depth=depth, token_budget=16)
    for name in "abc":
        world.arrive(name, prompt_len=10, max_tokens=12)
    for _ in range(4):
        world.finish_iteration()
    world.cancel("b")
    (worker_id,) = world.devices
    world.refuse(worker_id)
    assert world.plans[worker_id][0].epoch == 1
    world.drain()

    for name in "ac":
        assert world.output[name] == world.expected_output(name, 10, 12)
    world.check_drained()


def test_a_worker_that_refuses_again_and_again_is_dismissed() -> None:
    world = World(max_refusals=2)
    world.arrive("a", prompt_len=4, max_tokens=4)
    (worker_id,) = world.devices
    for _ in range(3):
        world.refuse(worker_id)

    assert [effect.worker_id for effect in world.effects if isinstance(effect, DismissWorker)] == [worker_id]
    world.join()
    world.drain()
    assert world.output["a"] == world.expected_output("a", 4, 4)


def test_a_worker_that_brings_no_result_in_time_is_dismissed() -> None:
    world = World(plan_timeout_ns=5_000_000_000)
    world.arrive("a", prompt_len=4, max_tokens=4)
    world.wait(6)

    assert [type(effect) for effect in world.effects if isinstance(effect, DismissWorker)] == [DismissWorker]
    assert not world.core.workers


def test_a_result_that_answers_no_plan_dismisses_its_worker() -> None:
    world = World()
    world.arrive("a", prompt_len=4, max_tokens=4)
    (worker_id,) = world.devices
    plan = world.plans[worker_id].popleft()
    _, sampled = world.devices[worker_id].run(plan)
    world._report(worker_id, plan, sampled[:0])

    assert not world.core.workers


def test_results_of_a_lost_worker_are_ignored() -> None:
    world = World()
    world.arrive("a", prompt_len=4, max_tokens=4)
    (worker_id,) = world.devices
    plan = world.plans[worker_id].popleft()
    _, sampled = world.devices[worker_id].run(plan)
    world.lose(worker_id)
    world._report(worker_id, plan, sampled)

    assert world.output["a"] == []


def test_a_worker_with_another_model_is_dismissed() -> None:
    world = World()
    card = world.cards[next(iter(world.devices))]
    other = type(card.model)(name="other", max_model_len=1, vocab_size=1, eos_token_ids=())
    world.model = other
    world.join()

    assert len(world.core.workers) == 1


def test_a_continuation_counts_what_was_delivered_before() -> None:
    world = World()
    world.arrive("a", prompt_len=6, max_tokens=10, output=4)
    world.drain()

    assert world.output["a"] == world.expected_output("a", 6, 10)
    (ended,) = world.terminals["a"]
    assert getattr(ended, "num_output_tokens", 0) == 10
    assert getattr(ended, "num_prompt_tokens", 0) == 6


def test_a_higher_priority_runs_earlier() -> None:
    world = World(max_running=1)
    world.arrive("running", prompt_len=4, max_tokens=4, priority=-5)
    world.arrive("batch", prompt_len=4, max_tokens=2, priority=5)
    world.arrive("urgent", prompt_len=4, max_tokens=2, priority=-5)
    world.drain()

    assert list(world.terminals) == ["running", "urgent", "batch"]


def test_same_events_same_effects() -> None:
    def trace() -> list[str]:
        world = World(num_workers=2, depth=2, num_blocks=12)
        for index, name in enumerate("abcdef"):
            world.arrive(name, prompt_len=3 + 5 * index, max_tokens=12)
            world.finish_iteration()
        world.cancel("c")
        world.lose(next(iter(world.devices)))
        world.drain()
        return [repr(effect) for effect in world.effects]

    assert trace() == trace()


def test_unknown_workers_reports_change_nothing() -> None:
    world = World()
    world.arrive("a", prompt_len=4)
    (worker_id,) = world.devices
    plan = world.plans[worker_id][0]
    effects = world.core.step(
        WorkerReported(
            worker_id=WorkerId(InstanceId("stranger")),
            report=PlanRefused(epoch=plan.epoch, iteration=plan.iteration, detail=""),
        ),
        world.now_ns,
    )
    assert effects == ()
