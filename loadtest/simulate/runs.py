"""Runs of the simulator: one here, or several in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadtest.simulate.measures import Outcome
from loadtest.simulate.options import SimulateOptions
from loadtest.simulate.setup import arrivals_for, world_of
from loadtest.simulate.simulation import Observer, Simulation
from loadtest.simulate.verdict import Criterion

MAX_CHILD_S = 24 * 3600
"""A simulation that takes longer has gone astray."""


class ChildFailed(Exception):
    """A process that should have simulated ended without a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run."""

    options: SimulateOptions
    seed: int
    targets_ms: tuple[float, ...] = ()  # whose late gaps are counted beside that of the options
    criterion: Criterion | None = None  # what it must hold; it ends when that is lost


def run_one(job: Job, observer: Observer | None = None, on_progress: Callable[[int], None] | None = None) -> Outcome:
    """Simulate in this process."""
    world = world_of(job.options, job.seed, job.targets_ms)
    is_decided = None
    if job.criterion is not None:
        is_decided = job.criterion.is_lost(arrivals_for(job.options, job.seed), job.options.num_warmup)
    return Simulation(world, observer).run(is_decided, on_progress)


def run_all(jobs: Sequence[Job], processes: int, on_end: Callable[[int], None] | None = None) -> list[Outcome]:
    """Simulate in so many processes at a time; outcomes in the order of the jobs.

    Args:
        jobs: What to run.
        processes: 0 takes one per processor.
        on_end: Told how many runs have ended.

    Raises:
        ChildFailed: If one of them does not end well.
    """
    at_a_time = min(len(jobs), processes or os.cpu_count() or 1)
    if at_a_time <= 1:
        return [run_one(job) for job in jobs]
    with ThreadPoolExecutor(at_a_time) as executor:
        futures = [executor.submit(_run_child, job) for job in jobs]
        for num_ended, _ in enumerate(as_completed(futures), start=1):
            if on_end is not None:
                on_end(num_ended)
        return [future.result() for future in futures]


def child_main() -> None:
    """What a process of run_all does: a job on standard input, its outcome on standard output."""
    given = json.load(sys.stdin)
    job = msgspec.convert(given, Job, dec_hook=_path_of)
    sys.stdout.buffer.write(msgspec.json.encode(run_one(job)))


def _run_child(job: Job) -> Outcome:
    given = json.dumps(asdict(job), default=str)
    ended = subprocess.run(
        [sys.executable, "-c", "from loadtest.simulate.runs import child_main; child_main()"],
        input=given.encode(),
        capture_output=True,
        timeout=MAX_CHILD_S,
        check=False,
    )
    if ended.returncode:
        raise ChildFailed(f"seed {job.seed}: {ended.stderr.decode(errors='replace')[-2000:]}")
    return msgspec.json.decode(ended.stdout, type=Outcome)


def _path_of(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)
