"""What a span says of its times."""

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.clock import monotonic_ns
from common.tracing import SpanEvent, Tracing


def test_times_of_a_span_are_apart_as_on_the_clock_that_took_them() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"))
    for _ in range(100):
        now_ns = monotonic_ns()
        tracing.write("decode", "", now_ns, now_ns + 700, {}, events=[SpanEvent("stall", now_ns + 300, {})])

    for span in exporter.get_finished_spans():
        assert span.start_time is not None
        assert span.end_time is not None
        (event,) = span.events
        assert (event.timestamp - span.start_time, span.end_time - span.start_time) == (300, 700)
    assert len(exporter.get_finished_spans()) == 100
