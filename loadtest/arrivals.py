"""When requests arrive: endless sequences of offsets from the start of a run, in nanoseconds.

Open-loop arrivals never wait for replies. A generator that does wait sends least when the server is slowest, and so
leaves out the very requests that would have suffered (coordinated omission). Closed loops exist too, for they are
what a fixed number of users does; see loadtest.drive.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from common.clock import NS_PER_S


def constant(rate_rps: float) -> Iterator[int]:
    """One request every 1 / rate_rps seconds."""
    _check_rate(rate_rps)
    return (round(index * NS_PER_S / rate_rps) for index in itertools.count())


def poisson(rate_rps: float, rng: random.Random) -> Iterator[int]:
    """Independent users: exponential gaps, none cut short.

    Cutting the long gaps, as some generators do, raises the rate and removes the lulls after which a queue empties.
    """
    _check_rate(rate_rps)
    return _sums(lambda: rng.expovariate(rate_rps))


def bursty(rate_rps: float, burstiness: float, rng: random.Random) -> Iterator[int]:
    """Gamma-distributed gaps whose squared coefficient of variation is burstiness; at 1 this is Poisson.

    Args:
        rate_rps: Mean requests per second, whatever the burstiness.
        burstiness: Above 1, requests come in clumps with lulls between; below 1, more evenly than Poisson.
        rng: Where the gaps come from.
    """
    _check_rate(rate_rps)
    if burstiness <= 0:
        raise ValueError(f"burstiness is {burstiness}; it must be above 0")
    shape = 1 / burstiness
    return _sums(lambda: rng.gammavariate(shape, 1 / (shape * rate_rps)))


def replay(arrivals_ns: Sequence[int], rate_rps: float | None = None) -> Iterator[int]:
    """The arrivals of a trace from its first on, begun anew when it ends.

    Args:
        arrivals_ns: Offsets in order, at least two of them.
        rate_rps: Stretches or squeezes the whole trace to this mean rate, which keeps its bursts; absent: as recorded.
    """
    if len(arrivals_ns) < 2:
        raise ValueError(f"a trace to replay needs two arrivals or more; this one has {len(arrivals_ns)}")
    first_ns, last_ns = arrivals_ns[0], arrivals_ns[-1]
    if last_ns <= first_ns:
        raise ValueError("all arrivals of the trace fall on one instant; there is no rate to replay")
    mean_gap_ns = (last_ns - first_ns) / (len(arrivals_ns) - 1)
    scale = 1.0
    if rate_rps is not None:
        _check_rate(rate_rps)
        scale = NS_PER_S / rate_rps / mean_gap_ns
    # One mean gap lies between the last arrival and the first of the next round, as between any two.
    round_ns = last_ns - first_ns + mean_gap_ns
    return (
        round((lap * round_ns + arrival_ns - first_ns) * scale)
        for lap in itertools.count()
        for arrival_ns in arrivals_ns
    )


def _sums(draw_gap_s: Callable[[], float]) -> Iterator[int]:
    at_s = 0.0
    while True:
        at_s += draw_gap_s()
        yield round(at_s * NS_PER_S)


def _check_rate(rate_rps: float) -> None:
    if not 0 < rate_rps < float("inf"):
        raise ValueError(f"the rate is {rate_rps} requests per second; it must be above 0")
