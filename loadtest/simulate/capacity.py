"""`legato simulate capacity`: the highest arrival rate at which the targets hold, by bisection, once for each seed."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from common.config import option
from loadtest.search import Bounds, Probe, bracket, capacity_of, next_rate
from loadtest.simulate.options import SimulateOptions
from loadtest.simulate.runs import Job, run_all
from loadtest.simulate.verdict import Criterion

MAX_PROBES_EACH = 60
"""Of one seed: a bisection that takes more has gone astray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions(SimulateOptions):
    """Options of `legato simulate capacity`; --rate is where the search begins."""

    seed: tuple[int, ...] = option((0, 1, 2), "one search each; their spread is the range")
    warmup_share: float = option(0.3, "of the requests, how many at the start load the system and are not counted")
    queue_timeout_s: float = option(3600.0, "the longest wait for a worker with room")
    max_waiting: int = option(100_000, "requests that may wait; more are refused")
    least_rate: float = option(0.03125, "lowest rate to try, requests per second")
    most_rate: float = option(256.0, "highest rate to try")
    precision_percent: float = option(5.0, "stop when the rate that breaks is so little above the one that holds")
    gap_share: float = option(0.99, "of the gaps, how many must be within --tbt-target-ms")
    max_delay_s: float = option(2.0, "of the median scheduling delay")

    def __post_init__(self) -> None:
        # Without super(): a dataclass with slots is not the class that the name super() looks up stands for.
        SimulateOptions.__post_init__(self)
        if not 0 < self.least_rate <= self.most_rate:
            raise ValueError(f"--least-rate {self.least_rate} and --most-rate {self.most_rate}: not in order")
        if not 0 < self.gap_share < 1:
            raise ValueError(f"--gap-share is {self.gap_share}; it must lie between 0 and 1")
        for name in ("precision_percent", "max_delay_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")

    @property
    def bounds(self) -> Bounds:
        return Bounds(least_rps=self.least_rate, most_rps=self.most_rate, precision=self.precision_percent / 100)

    @property
    def criterion(self) -> Criterion:
        return Criterion(late_share=1 - self.gap_share, max_delay_ns=int(1e9 * self.max_delay_s))

    def plain(self) -> SimulateOptions:
        """The options of one run."""
        names = SimulateOptions.__dataclass_fields__
        return SimulateOptions(**{name: getattr(self, name) for name in names})


class Found(msgspec.Struct, kw_only=True):
    """What the search says."""

    rate_rps: float  # median of the seeds
    low_rps: float
    high_rps: float
    coverage: float  # how sure it is that the median of all seeds lies between the two
    by_seed: list[float]
    num_probes: int


def search(options: CapacityOptions, tell: Callable[[str], None] | None = None) -> Found:
    """Search once for each seed, side by side.

    Args:
        options: The system, its load, and what must hold.
        tell: Given a line for each probe.
    """
    plain = options.plain()
    criterion = options.criterion
    seen: dict[int, list[Probe]] = {seed: [] for seed in options.seed}
    num_probes = 0
    for _ in range(MAX_PROBES_EACH):
        jobs = []
        for seed, probes in seen.items():
            rate_rps = next_rate(probes, _first(options, seen), options.bounds)
            if rate_rps is not None:
                jobs.append(Job(options=replace(plain, rate=rate_rps), seed=seed, criterion=criterion))
        if not jobs:
            break
        for job, outcome in zip(jobs, run_all(jobs, options.processes), strict=True):
            num_probes += 1
            holds = criterion.holds(outcome)
            rate_rps = job.options.rate
            assert rate_rps is not None, "set above"
            seen[job.seed].append(Probe(rate_rps=rate_rps, holds=holds))
            if tell is not None:
                delay_ns = outcome.scheduling_delay.quantile(0.5) or 0.0
                tell(
                    f"seed {job.seed}: {rate_rps:8.3f} requests/s   late {100 * outcome.late_shares[0]:6.3f}%   "
                    f"median delay {delay_ns / 1e9:6.2f} s   {'holds' if holds else 'breaks'}"
                )
    found = capacity_of(list(seen.values()))
    assert found is not None, "there is a seed"
    return Found(
        rate_rps=found.rate_rps,
        low_rps=found.low_rps,
        high_rps=found.high_rps,
        coverage=found.coverage,
        by_seed=[bracket(probes)[0] or 0.0 for probes in seen.values()],
        num_probes=num_probes,
    )


def main(argv: Sequence[str]) -> int:
    """Search, and print what was found; 1 where not even the lowest rate holds."""
    from loadtest.simulate.cli import options_from, write_json  # noqa: PLC0415 - the command line imports this module.

    parser = argparse.ArgumentParser(prog="legato simulate capacity")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found as one object")
    options, flags = options_from(parser, CapacityOptions, argv)
    found = search(options, lambda line: print(line, file=sys.stderr, flush=True))
    print(
        f"{found.rate_rps:.3g} requests/s, {found.low_rps:.3g} to {found.high_rps:.3g} "
        f"({100 * found.coverage:.0f}% sure, from {len(found.by_seed)} seeds)"
    )
    if flags.json is not None:
        result: dict[str, Any] = msgspec.to_builtins(found)
        write_json(flags.json, result)
    return 0 if found.rate_rps else 1


def _first(options: CapacityOptions, seen: dict[int, list[Probe]]) -> float:
    """Where a seed begins: where another is already, if one has found a rate that holds."""
    held = [rate for probes in seen.values() if (rate := bracket(probes)[0]) is not None]
    return max(held) if held else options.rate or 1.0
