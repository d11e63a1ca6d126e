"""The search for a capacity, as a function of what has been seen so far: pure, so that it resumes where it ended.

Each repeat searches anew with its own arrivals: it doubles the rate until the targets break, then halves the bracket
on a logarithmic scale until its ends are as close as asked for. The repeats' results differ by chance; the range from
their least to their greatest holds the median of all such results with a known probability, whatever their
distribution: 1 - 2^(1 - n), for n repeats on either side of the median like coins.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One run at one rate."""

    rate_rps: float
    holds: bool  # the targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Where to search, and how closely."""

    least_rps: float
    most_rps: float
    precision: float  # 0.05: stop when the breaking rate is at most 5% above the one that holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the repeats of a search say together."""

    rate_rps: float  # median of the repeats
    low_rps: float
    high_rps: float
    coverage: float  # probability that low to high holds the median


def next_rate(probes: Sequence[Probe], first_rps: float, bounds: Bounds) -> float | None:
    """Return the rate to try next in one repeat, or None when it is done."""
    held, broken = bracket(probes)
    if held is None and broken is None:
        return min(max(first_rps, bounds.least_rps), bounds.most_rps)
    if broken is None:
        assert held is not None, "one of the two is there"
        return None if held >= bounds.most_rps else min(2 * held, bounds.most_rps)
    if held is None:
        return None if broken <= bounds.least_rps else max(broken / 2, bounds.least_rps)
    return None if broken <= held * (1 + bounds.precision) else math.sqrt(held * broken)


def bracket(probes: Sequence[Probe]) -> tuple[float | None, float | None]:
    """Return the lowest rate that broke, and the highest below it that held (in the order: held, broken).

    Near the capacity chance decides, and a higher rate may hold where a lower one broke. The lower one counts.
    """
    broken = min((probe.rate_rps for probe in probes if not probe.holds), default=None)
    ceiling = math.inf if broken is None else broken
    held = max((probe.rate_rps for probe in probes if probe.holds and probe.rate_rps < ceiling), default=None)
    return held, broken


def capacity_of(repeats: Sequence[Sequence[Probe]]) -> Capacity | None:
    """Return the capacity from finished repeats: each one's highest rate that held, 0 where none did."""
    results = [bracket(probes)[0] or 0.0 for probes in repeats]
    if not results:
        return None
    return Capacity(
        rate_rps=statistics.median(results),
        low_rps=min(results),
        high_rps=max(results),
        coverage=1 - 2.0 ** (1 - len(results)),
    )
