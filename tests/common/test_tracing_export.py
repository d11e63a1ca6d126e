"""Spans wait in a bounded queue, and what does not fit is counted; nobody waits for the collector."""

import threading
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import REGISTRY

from common.traceparent import is_sampled
from common.tracing import Tracing
from common.tracing_export import BATCH_SPANS, MAX_QUEUED_SPANS, SpanQueue

WAIT_S = 30.0


class SlowCollector(SpanExporter):
    """Takes nothing until it is told to."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.is_asked = threading.Event()
        self.num_taken = 0
        self.largest_batch = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_asked.set()
        if not self.may_go_on.wait(WAIT_S):
            return SpanExportResult.FAILURE
        self.num_taken += len(spans)
        self.largest_batch = max(self.largest_batch, len(spans))
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is open."""


@pytest.fixture
def collector() -> Iterator[SlowCollector]:
    collector = SlowCollector()
    yield collector
    collector.may_go_on.set()


def dropped() -> float:
    return REGISTRY.get_sample_value("legato_spans_dropped_total") or 0.0


def test_a_full_queue_drops_and_counts(collector: SlowCollector) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SpanQueue(collector))
    tracing = Tracing(provider.get_tracer("test"))
    before = dropped()
    tracing.write("first", "", 1, 2, {})
    assert collector.is_asked.wait(WAIT_S), "the thread is busy with the first"
    for _ in range(MAX_QUEUED_SPANS + 50):
        tracing.write("span", "", 1, 2, {})
    assert dropped() - before == 50

    collector.may_go_on.set()
    provider.shutdown()

    assert collector.num_taken == MAX_QUEUED_SPANS + 1, "what was queued leaves before the end"
    assert collector.largest_batch == BATCH_SPANS


@pytest.mark.parametrize(("flags", "expected"), [("00", False), ("01", True), ("02", False), ("03", True)])
def test_the_last_bit_says_whether_a_trace_is_sampled(flags: str, expected: bool) -> None:
    assert is_sampled(f"00-{'1' * 32}-{'2' * 16}-{flags}") is expected
    assert not is_sampled("")
