"""Percentiles, and how far they can be trusted.

Tokens of one stream share its fate: a thousand gaps of one request are not a thousand observations. So confidence
intervals come from a bootstrap that draws whole requests, with all that belongs to them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
"""The figures of every distribution, in the order of reports."""

NUM_RESAMPLES = 400
"""Enough for the ends of a 95% interval to be steady to about a tenth of its width."""
MAX_RESAMPLED_VALUES = 80_000_000
"""A bound on work: with more values, fewer resamples (never below MIN_RESAMPLES). About two seconds."""
MIN_RESAMPLES = 60

Summary = dict[str, float | None]
"""Keys of QUANTILES; values None where there is nothing to summarize."""
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """Values, each with the number of the request that it belongs to (0 and up)."""

    values: NDArray[np.float64]
    owners: NDArray[np.int64]

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]]) -> "Sample":
        """A sample from the values of each request."""
        sizes = [len(group) for group in groups]
        return cls(
            np.fromiter((value for group in groups for value in group), np.float64, sum(sizes)),
            np.repeat(np.arange(len(groups), dtype=np.int64), sizes),
        )


def summarize(values: Sequence[float] | NDArray[np.float64]) -> Summary:
    """Return the quantiles of QUANTILES, linear between neighbouring values; None for all if there are no values."""
    if len(values) == 0:
        return dict.fromkeys(QUANTILES)
    found = np.quantile(np.asarray(values, dtype=np.float64), list(QUANTILES.values()))
    return {name: round(float(value), 3) for name, value in zip(QUANTILES, found, strict=True)}


def confidence_intervals(sample: Sample, seed: int = 0, level: float = 0.95) -> dict[str, Interval] | None:
    """Return percentile-bootstrap intervals of the quantiles, or None with fewer than two requests.

    That of the maximum is a poor one: no resample ever exceeds what was seen. It is given all the same, with its upper
    end at the maximum, and means no more than that.
    """
    num_owners = int(sample.owners.max()) + 1 if len(sample.owners) else 0
    if num_owners < 2:
        return None
    order = np.argsort(sample.values, kind="stable")
    values, owners = sample.values[order], sample.owners[order]
    rng = np.random.default_rng(seed)
    num_resamples = max(MIN_RESAMPLES, min(NUM_RESAMPLES, MAX_RESAMPLED_VALUES // len(values)))
    found = [
        _weighted_quantiles(values, np.bincount(rng.integers(0, num_owners, num_owners), minlength=num_owners)[owners])
        for _ in range(num_resamples)
    ]
    tail = (1 - level) / 2
    ends = np.quantile(np.array([row for row in found if row is not None]), [tail, 1 - tail], axis=0)
    return {name: (round(float(ends[0, i]), 3), round(float(ends[1, i]), 3)) for i, name in enumerate(QUANTILES)}


def difference_interval(a: float, a_interval: Interval, b: float, b_interval: Interval) -> Interval:
    """Return the interval of b - a from the intervals of two independent estimates.

    Source: MOVER, the method of variance estimates recovery (Zou and Donner, Statistics in Medicine 2008). It needs
    no more than the intervals, and keeps their asymmetry, which a P99 has plenty of.
    """
    difference = b - a
    lower = difference - math.hypot(b - b_interval[0], a_interval[1] - a)
    upper = difference + math.hypot(b_interval[1] - b, a - a_interval[0])
    return lower, upper


def _weighted_quantiles(values: NDArray[np.float64], weights: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Quantiles of sorted values, each counted as often as its weight says; None if all weights are zero."""
    ends = np.cumsum(weights)
    total = int(ends[-1])
    if total == 0:
        return None
    ranks = np.array([quantile * (total - 1) for quantile in QUANTILES.values()])
    below = np.searchsorted(ends, np.floor(ranks), side="right")
    above = np.searchsorted(ends, np.ceil(ranks), side="right")
    share = ranks - np.floor(ranks)
    found: NDArray[np.float64] = values[below] * (1 - share) + values[above] * share
    return found
