"""What the gateway counts. Labels come from fixed lists, never from a client."""

from collections.abc import Iterator
from typing import get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from common.account import Cause
from common.clock import NS_PER_S
from services.gateway.account import StallCounts
from services.gateway.errors import ApiError, ErrorCode

_TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_REQUEST_BUCKETS_S = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)
_GAP_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)


class _StallCollector(Collector):
    """Stalls by cause: read off when scraped, each cause from the start, so that a rate sees the first one."""

    def __init__(self, counts: StallCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        num = CounterMetricFamily(
            "legato_gateway_stalls",
            "Gaps at clients' connections above their stream's target, by cause; held_text is no stall of the ring",
            labels=["cause"],
        )
        late = CounterMetricFamily(
            "legato_gateway_stall_late_seconds", "Of these gaps, what lay above the target", labels=["cause"]
        )
        for cause in Cause:
            num.add_metric([cause], self._counts.num_by_cause[cause])
            late.add_metric([cause], self._counts.late_ns_by_cause[cause] / NS_PER_S)
        yield from (num, late)


class GatewayMetrics:
    """One process's metrics."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._calls = Counter(
            "legato_gateway_calls",
            "HTTP calls answered, by route and status class",
            ["route", "status"],
            registry=registry,
        )
        self._ttft = Histogram(
            "legato_gateway_ttft_seconds",
            "Arrival of a request until its first token leaves the gateway",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._gaps = Histogram(
            "legato_gateway_token_gap_seconds",
            "Time between neighbouring tokens of one stream as they leave the gateway",
            buckets=_GAP_BUCKETS_S,
            registry=registry,
        )
        self._max_gap = Histogram(
            "legato_gateway_max_token_gap_seconds",
            "The longest time between neighbouring tokens of each stream that has ended",
            buckets=_GAP_BUCKETS_S,
            registry=registry,
        )
        self._request = Histogram(
            "legato_gateway_request_seconds",
            "Arrival of a request until it ended, however it did",
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._rejections = Counter(
            "legato_gateway_rejections",
            "HTTP calls and connections that were refused, by error code",
            ["code"],
            registry=registry,
        )
        # Each from the start, so that a rate sees the first one. Of errors without a code, 400 is the usual status.
        for code in (*get_args(ErrorCode), "http_400"):
            self._rejections.labels(code)
        self._cancelled = Counter(
            "legato_gateway_cancellations", "Requests cancelled because nobody waits for them", registry=registry
        )
        self._tokens = Counter("legato_gateway_tokens", "Output tokens delivered", registry=registry)
        self._cut = Counter(
            "legato_gateway_slow_clients", "Clients cut off because they did not read", registry=registry
        )
        self.open_requests = Gauge(
            "legato_gateway_open_requests", "Requests without a terminal message", registry=registry
        )
        self.connections = Gauge("legato_gateway_connections", "Open HTTP connections", registry=registry)

    def count_stalls(self, counts: StallCounts) -> None:
        """Serve these counts from now on; called once."""
        self._registry.register(_StallCollector(counts))

    def call_answered(self, route: str, status: int) -> None:
        """route is a registered path or "other"; 499 stands for a client that left before the answer."""
        self._calls.labels(route, f"{status // 100}xx").inc()

    def first_token_sent(self, ttft_ns: int) -> None:
        self._ttft.observe(ttft_ns / NS_PER_S)

    def stream_ended(self, took_ns: int, max_gap_ns: int | None) -> None:
        """max_gap_ns is None for a stream without a gap."""
        self._request.observe(took_ns / NS_PER_S)
        if max_gap_ns is not None:
            self._max_gap.observe(max_gap_ns / NS_PER_S)

    def call_refused(self, error: ApiError) -> None:
        self._rejections.labels(error.code or f"http_{error.status}").inc()

    def cancelled(self, num_requests: int) -> None:
        self._cancelled.inc(num_requests)

    def gap_seen(self, gap_ns: int) -> None:
        self._gaps.observe(gap_ns / NS_PER_S)

    def tokens_sent(self, num_tokens: int) -> None:
        self._tokens.inc(num_tokens)

    def client_cut(self) -> None:
        self._cut.inc()
