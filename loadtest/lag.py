"""Whether the generator itself kept up. A run whose generator was late measures the generator."""

import asyncio

from common.clock import NS_PER_S, monotonic_ns

PROBE_INTERVAL_S = 0.02
"""Below what a person sees, far above what the probe costs (microseconds)."""

MAX_SEND_LAG_P99_MS = 10.0
"""A request sent later than this after its time is late. TTFT targets are hundreds of milliseconds."""
MAX_LOOP_LAG_P99_MS = 10.0
"""A read waits as long as the event loop is busy. TBT targets are tens of milliseconds; timers themselves are good to
about 1 ms."""
MAX_LOOP_LAG_MS = 100.0
"""One long pause (garbage collection, a suspended machine) puts a false stall into every stream at once."""
MAX_PROBES = 1_000_000


class LoopLagProbe:
    """Sleeps and looks how much too long it slept: what any event on this loop would have waited."""

    def __init__(self) -> None:
        self.lags_ns: list[int] = []

    async def run(self) -> None:
        """Measure until cancelled, or for MAX_PROBES (five and a half hours)."""
        for _ in range(MAX_PROBES):
            begun_ns = monotonic_ns()
            await asyncio.sleep(PROBE_INTERVAL_S)
            self.lags_ns.append(max(0, monotonic_ns() - begun_ns - round(PROBE_INTERVAL_S * NS_PER_S)))
