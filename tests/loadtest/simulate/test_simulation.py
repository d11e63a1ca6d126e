"""The whole simulation: the core, simulated workers, and a virtual clock."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.messages.plans import IterationDone
from common.messages.requests import FinishReason, RequestEnded
from loadtest.simulate.effects_log import EffectsLog
from loadtest.simulate.measures import Outcome
from loadtest.simulate.options import SimulateOptions
from loadtest.simulate.requests import arrivals_of, load_workload
from loadtest.simulate.runs import Job, run_all, run_one
from loadtest.simulate.setup import arrivals_for, world_of
from loadtest.simulate.simulation import Simulation
from services.scheduler.events import Effect, Event, RunIteration, SendStreams, WorkerReported


def options_of(**changes: Any) -> SimulateOptions:
    defaults: dict[str, Any] = {"workload": "azure_2023_conv", "requests": 30, "rate": 6.0}
    return SimulateOptions(**defaults | changes)


def simulate(seed: int = 0, **changes: Any) -> Outcome:
    return run_one(Job(options=options_of(**changes), seed=seed))


class Witness:
    """Keeps everything that the core saw and did."""

    def __init__(self, **changes: Any) -> None:
        self.options = options_of(**changes)
        self.steps: list[tuple[int, Event, tuple[Effect, ...]]] = []
        self.simulation = Simulation(world_of(self.options, 0), lambda *step: self.steps.append(step))
        self.outcome = self.simulation.run()

    def ended(self) -> list[RequestEnded]:
        return [
            ended
            for _, _, effects in self.steps
            for effect in effects
            if isinstance(effect, SendStreams)
            for ended in effect.batch.ended
            if isinstance(ended, RequestEnded)
        ]


def log_of(path: Path, seed: int) -> bytes:
    with EffectsLog(path) as log:
        run_one(Job(options=options_of(requests=15, workers=2, truth="tables", noise=0.2), seed=seed), log.observer)
    return path.read_bytes()


def test_one_seed_gives_one_trace_to_the_byte(tmp_path: Path) -> None:
    first = log_of(tmp_path / "first.txt", seed=5)
    assert first == log_of(tmp_path / "second.txt", seed=5)
    assert first != log_of(tmp_path / "third.txt", seed=6)


def test_every_request_ends_once_with_the_output_that_it_was_to_have() -> None:
    witness = Witness()
    wanted = {f"r{arrival.index}": arrival.output_len for arrival in arrivals_for(witness.options, 0)}
    ended = witness.ended()
    assert {end.request_id: end.num_output_tokens for end in ended} == wanted
    assert len(ended) == len(wanted)
    assert {end.reason for end in ended} == {FinishReason.LENGTH}
    assert witness.outcome.num_output_tokens == sum(wanted.values())
    assert witness.outcome.num_gaps == sum(wanted.values()) - len(wanted)


def test_requests_that_declare_more_end_by_an_end_of_sequence() -> None:
    witness = Witness(max_tokens=2000)
    wanted = {f"r{arrival.index}": arrival.output_len for arrival in arrivals_for(witness.options, 0)}
    assert {end.request_id: end.num_output_tokens for end in witness.ended()} == wanted
    assert {end.reason for end in witness.ended()} == {FinishReason.STOP}


@pytest.mark.parametrize("depth", [1, 2])
def test_plans_of_a_worker_never_overlap_and_none_begins_before_it_is_made(depth: int) -> None:
    witness = Witness(workers=2, depth=depth, ring_delay_ms=0.5, truth="tables", noise=0.1)
    made_ns: dict[tuple[str, int], int] = {}
    free_ns: Counter[str] = Counter()
    num_in_flight: Counter[str] = Counter()
    for now_ns, event, effects in witness.steps:
        if isinstance(event, WorkerReported):
            done = event.report
            assert isinstance(done, IterationDone)
            num_in_flight[event.worker_id] -= 1
            assert done.iteration == 0 or done.started_ns >= free_ns[event.worker_id]
            assert done.started_ns >= made_ns[event.worker_id, done.iteration] + 500_000
            assert now_ns == done.finished_ns + 500_000, "the result travels as long as the plan did"
            free_ns[event.worker_id] = done.finished_ns
        for effect in effects:
            if isinstance(effect, RunIteration):
                made_ns[effect.worker_id, effect.iteration] = now_ns
                num_in_flight[effect.worker_id] += 1
                assert num_in_flight[effect.worker_id] <= depth
    times = [now_ns for now_ns, _, _ in witness.steps]
    assert times == sorted(times)


def test_the_core_knows_when_plans_end_where_nothing_disturbs_them() -> None:
    outcome = simulate()
    assert outcome.error_sum / outcome.num_iterations < 1e-3


def test_two_plans_ahead_spare_the_device_the_way_round_the_ring() -> None:
    one, two = (simulate(depth=depth, ring_delay_ms=2.0) for depth in (1, 2))
    for outcome in (one, two):
        assert outcome.num_finished == 30
    assert two.tbt.quantile(0.5) < 0.9 * (one.tbt.quantile(0.5) or 0)  # type: ignore[operator]


def pipeline_outcome(*, is_told: bool) -> Outcome:
    """A pipeline of two stages under more load than it can take, whose scheduler is told of it or takes it for one
    stage; as many plans are in flight."""
    options = options_of(pp=2, rate=40.0, requests=150, depth=2 if is_told else 3)
    world = world_of(options, 0)
    if not is_told:
        joining = [
            replace(joined, card=msgspec.structs.replace(joined.card, pipeline_parallel=1)) for joined in world.joining
        ]
        world = replace(world, joining=joining)
    return Simulation(world).run()


def test_micro_batches_close_bubbles_of_a_pipeline() -> None:
    alone, taking_turns = pipeline_outcome(is_told=False), pipeline_outcome(is_told=True)
    assert alone.num_finished == taking_turns.num_finished == 150
    assert taking_turns.bubble_share < 0.5 * alone.bubble_share
    assert taking_turns.throughput_tok_s > 1.15 * alone.throughput_tok_s, "although its last streams run alone"
    assert taking_turns.late_shares[0] < 0.01


@pytest.mark.parametrize("pp", [2, 4])
def test_the_core_knows_when_plans_of_a_pipeline_end(pp: int) -> None:
    world = world_of(options_of(pp=pp, rate=12.0, requests=60), 0)
    expected_ns: list[int] = []
    errors: list[float] = []

    def watch(now_ns: int, event: Event, effects: tuple[Effect, ...]) -> None:
        if isinstance(event, WorkerReported) and isinstance(event.report, IterationDone):
            errors.append(abs(now_ns - expected_ns[-1]) / event.report.device_ns)
        (worker,) = world.core.workers
        expected_ns.extend(flight.end_ns for flight in list(worker.in_flight)[:1])

    Simulation(world, watch).run()
    assert sum(errors) / len(errors) < 0.05


def test_a_small_cache_preempts_and_still_finishes_everything() -> None:
    outcome = simulate(kv_tokens=9_000, rate=20.0, overcommit=3.0, max_tokens=1024)
    assert outcome.num_preemptions > 0
    assert outcome.num_recomputed_tokens > 0
    assert outcome.num_finished + outcome.num_rejected == 30
    assert outcome.kv_use_max > 0.9


def test_what_never_fits_is_counted_as_rejected() -> None:
    outcome = simulate(kv_tokens=1_500, requests=12)
    assert outcome.num_rejected > 0
    assert outcome.num_finished + outcome.num_rejected == outcome.num_arrived == 12


def test_two_workers_carry_more_than_one() -> None:
    one, two = (simulate(workers=workers, rate=30.0) for workers in (1, 2))
    assert (two.ttft.quantile(0.9) or 0) < 0.8 * (one.ttft.quantile(0.9) or 0)
    assert two.num_finished == one.num_finished == 30


def test_a_slower_device_is_slower_from_its_moment_on() -> None:
    assert simulate(slowdown_at=2.0, slowdown=2.0).elapsed_ns > simulate().elapsed_ns


def test_whole_prompts_stall_streams_and_chunks_do_not() -> None:
    chunked = simulate(tbt_target_ms=60.0)
    whole = simulate(tbt_target_ms=60.0, policy="prefill_first", token_budget=8192)
    assert chunked.late_shares[0] < 0.01
    assert (whole.max_gap.quantile(0.5) or 0) > 3 * (chunked.max_gap.quantile(0.5) or 0)


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    """Memory follows what runs at a time, not what ever ran."""
    options = options_of(workload="azure_2023_code", requests=200, rate=4.0, max_tokens=1024)
    world = world_of(options, 0)
    simulation = Simulation(world)
    most_open = 0

    def watch(num_ended: int) -> None:
        nonlocal most_open
        most_open = max(most_open, simulation.measures.num_open)

    outcome = simulation.run(on_progress=watch)
    assert outcome.num_finished == 200
    assert most_open < 60
    assert simulation.measures.num_open == 0
    assert world.total_lens == {}
    assert world.core.num_open == 0


def test_several_seeds_in_processes_give_what_each_gives_alone() -> None:
    jobs = [Job(options=options_of(requests=5), seed=seed) for seed in (1, 2)]
    assert run_all(jobs, processes=2) == [run_one(job) for job in jobs]


def test_outcomes_add_up() -> None:
    both = simulate(seed=1)
    other = simulate(seed=2)
    both.merge(other)
    assert both.seeds == [1, 2]
    assert both.num_finished == 60
    assert both.ttft.num_values == 60
    assert both.as_object()["seed"] == [1, 2]


def test_arrivals_of_a_trace_are_those_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at_s,num_prefill_tokens,num_decode_tokens\n0,10,3\n2,20,4\n4,30,5\n")
    arrivals = list(arrivals_of(load_workload(str(path), None, 0), "trace", None, 4, seed=0))
    assert [(arrival.due_ns, arrival.prompt_len, arrival.output_len) for arrival in arrivals] == [
        (0, 10, 3),
        (2_000_000_000, 20, 4),
        (4_000_000_000, 30, 5),
        (6_000_000_000, 10, 3),
    ]
    assert simulate(workload=str(path), arrivals="trace", rate=None, requests=4).num_output_tokens == 15
