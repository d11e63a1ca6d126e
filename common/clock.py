"""Time, as the shells read it: integer nanoseconds of this machine's monotonic clock."""

import time

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

monotonic_ns = time.monotonic_ns
"""Comparable only with itself, on one machine: differences between hops' clocks mean nothing."""


def ms(ns: int) -> float:
    """Nanoseconds as milliseconds, for logs and metrics."""
    return ns / NS_PER_MS
