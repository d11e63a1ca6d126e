"""`legato whatif FILE …`: what a recorded load would have met under other settings."""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from common.cost.devices import DEVICES
from common.cost.roofline import Roofline
from common.ids import InstanceId, WorkerId
from common.messages.streams import RequestArrived
from loadtest.simulate.device import EOS, SimulatedWorker, Stage
from loadtest.simulate.measures import Measures, Outcome
from loadtest.simulate.requests import Arrival
from loadtest.simulate.simulation import Simulation, SimulationFailed, World
from loadtest.simulate.truth import Disturbance, EqualPart, RooflineTruth
from loadtest.whatif.causes import LateGaps
from loadtest.whatif.past import Past, read_past
from services.scheduler.core import SchedulerCore
from services.scheduler.events import WorkerJoined
from services.scheduler.limits import Limits
from services.scheduler.policy import POLICIES
from services.scheduler.recording.segment import BadRecording

DESCRIPTION = """Take the requests of a recorded segment, and simulate the scheduler with them under other settings:
iterations take what the recording's own cost model, as learned by the segment's end, says, with noise as large as its
error. The middle column simulates the recorded settings: how far it is from the first is how far to trust the last."""


@dataclass(frozen=True, slots=True)
class Column:
    """One way in which the load was met."""

    title: str
    outcome: Outcome
    late: LateGaps


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; return the exit status."""
    parser = argparse.ArgumentParser(prog="legato whatif", description=DESCRIPTION)
    parser.add_argument("path", type=Path, metavar="FILE", help="a segment of the flight recorder")
    parser.add_argument("--tbt-target-ms", type=float, help="the longest time between two tokens that is on time")
    parser.add_argument("--policy", choices=sorted(POLICIES), help="what runs next")
    parser.add_argument("--token-budget", type=int, help="tokens an iteration may compute, instead of the derived one")
    parser.add_argument("--workers", type=int, help="how many, each like the recording's first")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    flags = parser.parse_args(argv)
    try:
        past = read_past(flags.path)
        limits, num_workers = _settings(flags, past)
        columns = [
            Column("recorded", past.outcome, past.late),
            simulate(past, past.limits, len(past.cards), flags.seed, "simulated, as recorded"),
            simulate(past, limits, num_workers, flags.seed, "simulated, what if"),
        ]
    except (BadRecording, SimulationFailed, OSError, ValueError) as error:
        print(f"legato whatif: {error}", file=sys.stderr)
        return 2
    print(_heading(past, limits, num_workers))
    print(_table(columns))
    return 0


def simulate(past: Past, limits: Limits, num_workers: int, seed: int, title: str) -> Column:
    """Run the recorded load on so many simulated workers, for as long as it was recorded.

    Raises:
        SimulationFailed: If the core does not do what it should.
    """
    # Ends of sequence come where the recording had them, by a token of the simulation's own.
    card = past.cards[0]
    card = msgspec.structs.replace(card, model=msgspec.structs.replace(card.model, eos_token_ids=(EOS,)))
    roofline = Roofline(card.shape, DEVICES[card.device_kind], card.tensor_parallel)
    total_lens: dict[object, int] = {}
    joining, workers = [], []
    for index in range(num_workers):
        worker_id = WorkerId(InstanceId(f"worker-{index}"))
        noise = Disturbance(random.Random(f"{seed}:{index}"), noise=min(0.9, 2 * past.error))
        stage = Stage(truth=EqualPart(RooflineTruth(roofline, past.fit), card.pipeline_parallel))
        stages = [stage] * card.pipeline_parallel
        workers.append(SimulatedWorker(worker_id, stages, noise, total_lens))  # type: ignore[arg-type]
        joining.append(WorkerJoined(worker_id=worker_id, card=card, fit=past.fit))
    world = World(
        core=SchedulerCore(limits),
        joining=joining,
        workers=workers,
        arrivals=(_arrival(index, past) for index in range(len(past.requests))),
        targets_ns=[limits.tbt_target_ns],
        seed=seed,
        num_warmup=past.num_open_at_start,
        total_lens=total_lens,  # type: ignore[arg-type]
        make_request=lambda arrival: _request(past.requests[arrival.index].arrived),
    )
    late = LateGaps(limits.tbt_target_ns)
    simulation = Simulation(world, late.observe)

    def is_over(measures: Measures, now_ns: int) -> bool:
        return now_ns >= past.duration_ns

    outcome = simulation.run(is_over)
    return Column(title, outcome, late)


def _settings(flags: argparse.Namespace, past: Past) -> tuple[Limits, int]:
    """The other settings: the recorded ones, but for what is asked."""
    limits = past.limits
    if flags.tbt_target_ms is not None:
        if not flags.tbt_target_ms > 0:
            raise ValueError(f"--tbt-target-ms is {flags.tbt_target_ms:g}; it must be above 0")
        target_ns = int(1e6 * flags.tbt_target_ms)
        allowance_ns = limits.ring_allowance_ns * target_ns // limits.tbt_target_ns
        limits = replace(limits, tbt_target_ns=target_ns, ring_allowance_ns=allowance_ns)
    if flags.policy is not None:
        limits = replace(limits, policy=flags.policy)
    if flags.token_budget is not None:
        limits = replace(limits, fixed_token_budget=flags.token_budget or None)
    num_workers = len(past.cards) if flags.workers is None else flags.workers
    if not 1 <= num_workers <= 1024:
        raise ValueError(f"--workers is {num_workers}; between 1 and 1024")
    return limits, num_workers


def _arrival(index: int, past: Past) -> Arrival:
    request = past.requests[index]
    return Arrival(
        index=index,
        due_ns=request.due_ns,
        prompt_len=request.arrived.num_prompt_tokens,
        output_len=request.num_output_tokens,
    )


def _request(arrived: RequestArrived) -> RequestArrived:
    """The request, ended by the simulation's token alone."""
    sampling = msgspec.structs.replace(arrived.sampling, stop_token_ids=(), ignore_eos=False)
    return msgspec.structs.replace(arrived, sampling=sampling)


def _heading(past: Past, limits: Limits, num_workers: int) -> str:
    return (
        f"{len(past.requests)} requests over {past.duration_ns / 1e9:.1f} s, of which {past.num_open_at_start} were "
        f"open at the start: simulations read those anew, and none of their times count\n"
        f"recorded: target {past.limits.tbt_target_ns / 1e6:g} ms, {past.limits.policy}, {len(past.cards)} workers; "
        f"what if: target {limits.tbt_target_ns / 1e6:g} ms, {limits.policy}, {num_workers} workers"
    )


def _table(columns: Sequence[Column]) -> str:
    causes = sorted({cause for column in columns for cause in column.late.num_by_cause})
    rows = [["", *(column.title for column in columns)]]
    for share, name in ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9")):
        rows.append([f"gap {name}, ms", *(_at(column.outcome.tbt.quantile(share)) for column in columns)])
    rows.append(["largest gap, ms", *(f"{column.late.max_gap_ns / 1e6:.1f}" for column in columns)])
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        rows.append([f"first token {name}, ms", *(_at(column.outcome.ttft.quantile(share)) for column in columns)])
    rows.append(["gaps above target", *(f"{column.late.num_late} of {column.late.num_gaps}" for column in columns)])
    for cause in causes:
        rows.append([f"  {cause}", *(str(column.late.num_by_cause[cause]) for column in columns)])
    rows.append(["preemptions", *(str(column.outcome.num_preemptions) for column in columns)])
    rows.append(["iterations", *(str(column.outcome.num_iterations) for column in columns)])
    rows.append(["output tokens per s", *(f"{column.outcome.throughput_tok_s:.1f}" for column in columns)])
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join(
        row[0].ljust(widths[0])
        + "".join(cell.rjust(width + 3) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def _at(value_ns: float | None) -> str:
    return "-" if value_ns is None else f"{value_ns / 1e6:.1f}"


if __name__ == "__main__":
    sys.exit(main())
