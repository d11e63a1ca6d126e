"""Metrics that every process has: how late its event loop is, and the links that it has lost."""

import asyncio

from prometheus_client import Counter, Histogram

from common.clock import NS_PER_S, monotonic_ns

PROBE_S = 0.1
"""Between two looks at the event loop: ten timers a second, which cost nothing to speak of."""

LOOP_LAG_SECONDS = Histogram(
    "legato_event_loop_lag_seconds",
    "How late a timer of the event loop fired: for so long everything in this process waited",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1),
)
LINKS_LOST = Counter("legato_links_lost", "Links that ended, by the role at their other end", ["peer_role"])


async def watch_loop() -> None:
    """Observe the event loop's lag until cancelled."""
    while True:
        due_ns = monotonic_ns() + int(PROBE_S * NS_PER_S)
        await asyncio.sleep(PROBE_S)
        LOOP_LAG_SECONDS.observe(max(0, monotonic_ns() - due_ns) / NS_PER_S)
