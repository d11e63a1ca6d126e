"""A worker that is a pipeline: micro-batches of different streams take turns, so that every stage has a plan."""

from typing import Any

import pytest

from common.cost.load import Load
from services.scheduler.deadlines import Decodes, choose_decodes
from services.scheduler.micro_batches import deal, even_out
from tests.services.scheduler.test_account import last_gap, streaming
from tests.services.scheduler.test_law import MS, stream, ten_ms_each
from tests.services.scheduler.world import World


def pipeline(num_stages: int = 2, **options: Any) -> World:
    return World(**{"pipeline_parallel": num_stages, "token_budget": 64} | options)


def decoding(world: World) -> list[set[str]]:
    """Of each plan in flight, oldest first, the streams that it carries."""
    (worker,) = world.core.workers
    return [{decode.request_id for decode in flight.plan.decodes} for flight in worker.in_flight]


def settled(num_stages: int, names: str, **options: Any) -> World:
    """A pipeline in which these streams have run for some rounds."""
    world = pipeline(num_stages, **options)
    for name in names:
        world.arrive(name, prompt_len=4, max_tokens=100)
    for _ in range(6 * num_stages):
        world.finish_iteration()
    return world


@pytest.mark.parametrize("num_stages", [2, 3])
def test_each_stage_has_a_plan_of_streams_of_its_own_and_all_are_as_large(num_stages: int) -> None:
    names = "abcdefgh"[: 2 * num_stages]
    world = settled(num_stages, names, depth=1)
    plans = decoding(world)
    assert [len(streams) for streams in plans] == [2] * num_stages
    assert set.union(*plans) == set(names)


def test_streams_stay_in_their_micro_batch_and_the_next_plan_of_one_leaves_before_its_result_is_back() -> None:
    world = settled(2, "abcd", depth=2)
    first, second, ahead = decoding(world)
    assert first == ahead
    assert first.isdisjoint(second)
    for _ in range(3):
        world.finish_iteration()
        assert decoding(world) == [second, first, second]
        world.finish_iteration()
        assert decoding(world) == [first, second, first]


def test_a_lone_stream_is_in_no_more_plans_than_without_a_pipeline() -> None:
    world = settled(3, "a", depth=2)
    assert decoding(world) == [{"a"}, {"a"}]


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    world = pipeline(token_budget=8, depth=1)
    world.arrive("document", prompt_len=40, max_tokens=5)
    (worker,) = world.core.workers
    chunks = [[(chunk.start, chunk.num_tokens) for chunk in flight.plan.chunks] for flight in worker.in_flight]
    assert chunks == [[(0, 8)], [(8, 8)]]
    world.drain()
    assert world.output["document"] == world.expected_output("document", 40, 5)


def test_when_streams_of_one_micro_batch_end_others_take_their_place() -> None:
    world = settled(2, "abcd", depth=1)
    first, second = decoding(world)
    for name in first:
        world.cancel(name)
    for _ in range(6):
        world.finish_iteration()
    plans = decoding(world)
    assert [len(streams) for streams in plans] == [1, 1]
    assert set.union(*plans) == second


def test_a_cancelled_request_frees_its_blocks_after_as_many_plans_as_are_in_flight() -> None:
    world = settled(3, "abc", depth=2)
    for name in "abc":
        world.cancel(name)
    for _ in range(3 + 1):
        world.finish_iteration()
    assert not any(world.plans.values())
    world.check_drained()


def test_a_refused_plan_of_a_pipeline_opens_a_new_epoch_and_nothing_is_lost() -> None:
    world = settled(2, "abcd", depth=2)
    (worker_id,) = world.devices
    world.refuse(worker_id)
    world.drain()
    for name in "abcd":
        assert world.output[name] == world.expected_output(name, 4, 100)


def test_where_prompts_and_streams_take_turns_every_micro_batch_has_its_own() -> None:
    world = settled(2, "ab", depth=1, policy="chunked_only", token_budget=8)
    world.arrive("document", prompt_len=150, max_tokens=5)
    before = {name: len(world.output[name]) for name in "ab"}
    for _ in range(12):
        world.finish_iteration()
    assert not world.output["document"]
    assert all(len(world.output[name]) >= before[name] + 2 for name in "ab")


def test_a_steady_gap_in_a_pipeline_is_the_decode_work_of_its_own_micro_batch() -> None:
    world = pipeline(depth=2)
    streaming(world, "a", "b")
    for _ in range(10):
        (worker,) = world.core.workers
        world.finish_iteration(idle_ns=0, took_ns=worker.in_flight[0].plan.predicted_ns // 2)
    gap = last_gap(world, "a")
    assert gap.decode_ns == pytest.approx(world.iterations[-4].predicted_ns, rel=0.01)
    assert abs(gap.total_ns / gap.decode_ns - 1) < 0.01, "a round of the pipeline"
    assert abs(gap.not_scheduled_ns) < 0.01 * gap.decode_ns
    assert abs(gap.device_slow_ns) < 0.01 * gap.decode_ns


def test_a_plan_leaves_streams_of_later_plans_room_for_plans_as_long_as_itself() -> None:
    own, other = stream(100), stream(90)
    other.micro_batch = 1
    dealt = deal([own, other], 0, num_stages=2, wait_ns=0)
    assert (dealt.own, dealt.others) == ([own], [other])
    assert other.slack_ns == 60 * MS, "60 ms until this plan is through, and half of as much for the next one"
    decodes = choose_decodes(
        dealt.own, ten_ms_each, margin_ns=0, allowance_ns=5 * MS, lost_ns=1000 * MS, others=dealt.others
    )
    assert decodes == Decodes([own], 55 * MS)


def test_a_plan_without_streams_keeps_the_deadlines_of_others() -> None:
    other = stream(90)
    other.micro_batch = 2
    dealt = deal([other], 0, num_stages=3, wait_ns=0)
    decodes = choose_decodes(
        dealt.own, ten_ms_each, margin_ns=0, allowance_ns=0, lost_ns=1000 * MS, others=dealt.others
    )
    assert decodes == Decodes([], 54 * MS)


def test_a_deadline_of_another_micro_batch_that_is_lost_anyway_no_longer_counts() -> None:
    own, lost = stream(100), stream(12)
    lost.micro_batch = 1
    dealt = deal([own, lost], 0, num_stages=2, wait_ns=0)
    decodes = choose_decodes(
        dealt.own, ten_ms_each, margin_ns=0, allowance_ns=0, lost_ns=1000 * MS, others=dealt.others
    )
    assert decodes == Decodes([own], 100 * MS)


def test_behind_a_longer_plan_there_is_time_only_for_what_each_stage_then_does() -> None:
    own = stream(50)
    deal([own], 0, num_stages=2, wait_ns=40 * MS)
    assert own.slack_ns == 20 * MS, "of the 50 ms the last stage is taken for 40, and 10 are left there"


def test_a_stream_without_time_for_it_does_not_change_its_micro_batch() -> None:
    (worker,) = pipeline(tbt_target_ns=100 * MS).core.workers
    load = Load()
    load.add_decodes(2, 200)
    needed_ms = (worker.predict_ns(load) + worker.margin.ns) / MS
    hasty, patient = stream(needed_ms - 1), stream(needed_ms + 1)
    even_out(worker, 0, [patient, hasty], start_ns=0, now_ns=0, allowance_ns=0)
    assert (patient.micro_batch, hasty.micro_batch) == (1, 0)
