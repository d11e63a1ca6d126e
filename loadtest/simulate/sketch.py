"""Quantiles of any number of values in bounded memory."""

import math
from typing import Any

import msgspec

RELATIVE_ERROR = 0.005
"""A quantile is off by at most this share of itself. From a nanosecond to a day there are 3,200 buckets then."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
"""The figures of every distribution, as in loadtest.stats."""

_LOG_GAMMA = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_MIDDLE = 2 / (1 + math.exp(_LOG_GAMMA))


class Sketch(msgspec.Struct):
    """Counts per bucket of a logarithmic scale; two sketches add up to the sketch of both.

    Source: DDSketch (Masson, Rim and Lee, VLDB 2019).
    """

    counts: dict[int, int] = msgspec.field(default_factory=dict)
    num_values: int = 0
    total: int = 0
    most: int = 0

    def add(self, value: int, count: int = 1) -> None:
        """Take in a value of 0 or more, as often as count says."""
        # What is below 1 shares the bucket of 1: values are nanoseconds.
        bucket = math.ceil(math.log(value) / _LOG_GAMMA) if value > 1 else 0
        self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.num_values += count
        self.total += value * count
        self.most = max(self.most, value)

    def merge(self, other: "Sketch") -> None:
        """Take in all that the other has seen."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.num_values += other.num_values
        self.total += other.total
        self.most = max(self.most, other.most)

    def quantile(self, share: float) -> float | None:
        """Return the value of rank share * (num_values - 1), rounded down; None of no values. The largest is exact.

        So P999 of fewer than a thousand values is one of those below the largest.
        """
        if not self.num_values:
            return None
        if share >= 1:
            return float(self.most)
        rank = share * (self.num_values - 1)
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen > rank:
                middle = _MIDDLE * math.exp(bucket * _LOG_GAMMA) if bucket else 0.0
                return min(middle, float(self.most))
        raise AssertionError("the counts add up to num_values")

    def num_above(self, value: float) -> int:
        """Return how many values lie in buckets above that of this one."""
        bucket = math.ceil(math.log(value) / _LOG_GAMMA) if value > 1 else 0
        return sum(count for other, count in self.counts.items() if other > bucket)

    def mean(self) -> float | None:
        """Return the exact mean; None of no values."""
        return self.total / self.num_values if self.num_values else None

    def summary_ms(self) -> dict[str, Any]:
        """Return the quantiles of QUANTILES of nanoseconds, in milliseconds; None where nothing was seen."""
        found = {name: self.quantile(share) for name, share in QUANTILES.items()}
        return {name: None if value is None else round(value / 1e6, 3) for name, value in found.items()}
