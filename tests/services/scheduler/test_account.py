"""Which part of a gap is whose: the scheduler divides what lies between two tokens at the worker.

That the parts sum to the gap holds in every test of the scheduler: World checks it with each token.
"""

from common.ids import WorkerId
from common.messages.gaps import WorkerGap
from services.scheduler.account import MAX_CULPRITS
from tests.services.scheduler.world import World

MS = 1_000_000


def streaming(world: World, *names: str, prompt_len: int = 4, max_tokens: int = 40) -> None:
    """Have requests run that have just had a first token, all of them in one iteration."""
    for name in names:
        world.arrive(name, prompt_len=prompt_len, max_tokens=max_tokens)
    while not all(len(world.output[name]) for name in names):
        world.finish_iteration()
    world.gaps.clear()


def last_gap(world: World, name: str) -> WorkerGap:
    return world.gaps[name][-1]


def test_a_steady_gap_is_decode_work_and_what_the_device_took_beyond_it() -> None:
    world = World(token_budget=64)
    streaming(world, "a", "b")
    world.finish_iteration(idle_ns=0, took_ns=50 * MS)

    gap = last_gap(world, "a")

    assert gap == WorkerGap(decode_ns=gap.decode_ns, device_slow_ns=50 * MS - gap.decode_ns)
    assert gap.decode_ns == world.iterations[-2].predicted_ns > 0
    assert last_gap(world, "b") == gap


def test_time_without_a_plan_is_plan_wait() -> None:
    world = World(token_budget=64)
    streaming(world, "a")
    world.finish_iteration(idle_ns=30 * MS, took_ns=5 * MS)
    assert last_gap(world, "a").plan_wait_ns == 30 * MS


def test_what_a_prompt_adds_to_an_iteration_is_its_interference_and_it_is_named() -> None:
    world = World(token_budget=30, num_blocks=128, tbt_target_ns=MS)
    streaming(world, "a", "b")
    world.arrive("document", prompt_len=100, traceparent="00-1-2-01")
    world.finish_iteration(took_ns=20 * MS)  # was planned before it came
    world.finish_iteration(took_ns=20 * MS)

    gap = last_gap(world, "a")

    plan = world.iterations[-2]
    assert [chunk.num_tokens for chunk in plan.chunks] == [28]
    assert gap.prefill_interference_ns == plan.predicted_ns - gap.decode_ns > 0
    (culprit,) = gap.culprits
    assert (culprit.request_id, culprit.num_tokens, culprit.traceparent) == ("document", 28, "00-1-2-01")
    assert culprit.ns == gap.prefill_interference_ns


def test_culprits_share_the_interference_by_their_tokens_and_their_number_is_bounded() -> None:
    world = World(token_budget=250, num_blocks=256, max_num_slots=32, tbt_target_ns=MS)
    streaming(world, "a")
    for index in range(MAX_CULPRITS + 2):
        world.arrive(f"prompt-{index}", prompt_len=10 + index)
    world.finish_iteration()
    world.finish_iteration(took_ns=20 * MS)

    gap = last_gap(world, "a")

    assert len(gap.culprits) == MAX_CULPRITS
    assert [culprit.num_tokens for culprit in gap.culprits] == list(range(19, 11, -1)), "those that took the most"
    assert sum(culprit.ns for culprit in gap.culprits) < gap.prefill_interference_ns


def test_a_gap_well_below_every_target_names_nobody() -> None:
    world = World(token_budget=30, num_blocks=128)
    streaming(world, "a")
    world.arrive("document", prompt_len=100)
    world.finish_iteration(took_ns=MS)
    world.finish_iteration(took_ns=MS)
    assert last_gap(world, "a").prefill_interference_ns > 0
    assert last_gap(world, "a").culprits == ()


def test_prompts_that_run_alone_are_interference_from_end_to_end() -> None:
    world = World(policy="prefill_first", num_blocks=256, tbt_target_ns=MS)
    streaming(world, "a", "b")
    world.arrive("first", prompt_len=50)
    world.finish_iteration()
    world.arrive("second", prompt_len=60)
    world.finish_iteration(took_ns=MS)
    world.finish_iteration(took_ns=MS)
    num_gaps = len(world.gaps["a"])
    alone = world.iterations[-3:-1]
    assert [len(plan.decodes) for plan in alone] == [0, 0]
    world.finish_iteration(took_ns=MS)

    gap = last_gap(world, "a")

    assert len(world.gaps["a"]) == num_gaps + 1
    assert gap.prefill_interference_ns == sum(plan.predicted_ns for plan in alone)
    assert gap.not_scheduled_ns == 0
    assert sorted(culprit.request_id for culprit in gap.culprits) == ["first", "second"]
    assert last_gap(world, "b") == gap


def test_streams_that_lose_their_blocks_name_the_one_that_got_them() -> None:
    world = World(token_budget=64, num_blocks=8, block_size=4, has_prefix_cache=False)
    streaming(world, "old", "new", prompt_len=12, max_tokens=18)
    while world.core.num_waiting == 0:
        world.finish_iteration(idle_ns=0, took_ns=MS)
    before = len(world.output["new"])
    while len(world.output["new"]) == before:
        world.finish_iteration(idle_ns=0, took_ns=MS)

    gap = last_gap(world, "new")

    assert gap.preemption_ns > 0
    assert gap.num_recomputed_tokens > 0
    assert [culprit.request_id for culprit in gap.culprits] == ["old"]
    assert gap.prefill_interference_ns == gap.kv_wait_ns == gap.not_scheduled_ns == 0

    # That is over with the token: a later gap in which it is computed again for another reason begins there.
    (worker_id,) = world.devices
    world.refuse(worker_id)
    while len(world.output["new"]) == before + 1:
        world.finish_iteration(idle_ns=0, took_ns=MS)
    assert last_gap(world, "new").preemption_ns == 0


def test_a_stream_for_which_there_is_no_block_waits_for_kv() -> None:
    world = World(token_budget=64, num_blocks=13, block_size=4, depth=2, has_prefix_cache=False)
    streaming(world, "oldest", "old", "new", prompt_len=12, max_tokens=20)
    world.drain()

    # A plan in flight named the newest when another needed its blocks, so for an iteration that one had none.
    gap = next(gap for gap in world.gaps["oldest"] + world.gaps["old"] if gap.kv_wait_ns > 0)

    assert gap.not_scheduled_ns == gap.preemption_ns == 0
    assert any(plan.predicted_ns == gap.kv_wait_ns for plan in world.iterations)
    assert any(gap.preemption_ns > 0 for gap in world.gaps["new"])


def test_tokens_from_two_workers_are_measured_at_the_scheduler() -> None:
    world = World(token_budget=64, num_workers=2)
    streaming(world, "a")
    (first,) = [WorkerId(worker) for worker, plans in world.plans.items() if plans]
    (second,) = [worker for worker in world.devices if worker != first]
    world.finish_iteration(first)
    began_ns = world.now_ns
    world.now_ns += 70 * MS
    world.lose(first)
    while len(world.gaps["a"]) < 2:
        world.finish_iteration(second, idle_ns=0, took_ns=5 * MS)

    gap = last_gap(world, "a")

    assert gap.total_ns == world.now_ns - began_ns
    assert gap.worker_lost_ns == gap.total_ns - gap.decode_ns > 0
    assert gap.num_recomputed_tokens > 0


def test_a_worker_that_comes_back_under_its_old_name_begins_a_new_account() -> None:
    world = World(token_budget=64)
    streaming(world, "a")
    (worker_id,) = world.devices
    world.finish_iteration(idle_ns=50 * MS, took_ns=5 * MS)
    began_ns = world.now_ns
    world.lose(worker_id)
    world.join(worker_id=worker_id)
    while len(world.gaps["a"]) < 2:
        world.finish_iteration(idle_ns=0, took_ns=5 * MS)

    gap = last_gap(world, "a")

    assert gap.plan_wait_ns == gap.device_slow_ns == 0
    assert gap.worker_lost_ns == world.now_ns - began_ns - gap.decode_ns


def test_a_stream_that_sat_out_for_others_was_not_scheduled() -> None:
    """Half of the streams have patience, and the device is too slow for all of them at once."""
    world = World(token_budget=None, num_blocks=512, max_num_slots=32)
    for index in range(16):
        world.arrive(f"patient-{index}", prompt_len=4, max_tokens=100, tbt_target_ms=10**6)
    while not all(world.output.get(f"patient-{index}") for index in range(16)):
        world.finish_iteration()
    lone = world.iterations[-1].predicted_ns
    world.arrive("hasty", prompt_len=4, max_tokens=100, tbt_target_ms=0.97 * lone / MS)
    for _ in range(12):
        world.finish_iteration(idle_ns=0, took_ns=lone)
    assert world.gaps["patient-15"]
    sat_out = [gap for gaps in world.gaps.values() for gap in gaps if gap.not_scheduled_ns > 0]
    assert sat_out
    assert all(gap.prefill_interference_ns == 0 for gap in sat_out)


def test_a_refused_plan_leaves_no_gap_unexplained() -> None:
    world = World(token_budget=64, depth=2)
    streaming(world, "a")
    (worker_id,) = world.devices
    world.refuse(worker_id)
    world.finish_iteration(idle_ns=10 * MS, took_ns=MS)
    assert last_gap(world, "a").plan_wait_ns >= 10 * MS


def gaps_and_late(world: World) -> tuple[int, int]:
    """How many gaps there were between tokens, and how many of them above the pool's target."""
    gaps = [gap.total_ns for gaps in world.gaps.values() for gap in gaps]
    return len(gaps), sum(gap_ns > world.core.limits.tbt_target_ns for gap_ns in gaps)


def test_a_late_gap_over_a_preemption_counts() -> None:
    world = World(token_budget=64, num_blocks=8, block_size=4, has_prefix_cache=False, tbt_target_ns=20 * MS)
    for name in ("old", "new"):
        world.arrive(name, prompt_len=12, max_tokens=18)
    while any(world.plans.values()):
        world.finish_iteration(idle_ns=0, took_ns=7 * MS)
    assert gaps_and_late(world) == (34, 1), "that of the one that was preempted"
    assert (world.core.num_gaps, world.core.num_late_gaps) == (34, 1)
    assert world.core.workers[0].margin.num_observed == 0


def one_of_nine_is_late(world: World, epoch: int, iteration: int) -> None:
    """Of nine gaps one is, in both counts, and the iteration that ended it is kept."""
    assert gaps_and_late(world) == (9, 1)
    assert (world.core.num_gaps, world.core.num_late_gaps) == (9, 1)
    (plan,) = [plan for plan in world.iterations if plan.kept]
    assert [(kept.epoch, kept.iteration) for kept in plan.kept] == [(epoch, iteration)]


def test_a_late_gap_over_a_refused_plan_counts() -> None:
    world = World(token_budget=64, tbt_target_ns=20 * MS, depth=2)
    world.arrive("a", prompt_len=4, max_tokens=10, traceparent="00-1-2-01")
    for _ in range(4):
        world.finish_iteration(idle_ns=0, took_ns=7 * MS)
    (worker_id,) = world.devices
    world.now_ns += 30 * MS
    world.refuse(worker_id)
    world.drain()
    one_of_nine_is_late(world, epoch=1, iteration=0)


def test_a_late_gap_over_the_loss_of_a_worker_counts() -> None:
    world = World(token_budget=64, num_workers=2, tbt_target_ns=20 * MS)
    world.arrive("a", prompt_len=4, max_tokens=10, traceparent="00-1-2-01")
    (first,) = [WorkerId(worker) for worker, plans in world.plans.items() if plans]
    for _ in range(4):
        world.finish_iteration(first)
    world.now_ns += 30 * MS
    world.lose(first)
    world.drain()
    one_of_nine_is_late(world, epoch=0, iteration=0)
