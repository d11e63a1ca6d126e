"""Spans of this process (OpenTelemetry), and the trace contexts that travel with requests (W3C Trace Context).

Spans are written when what they tell of is over, with the times at which it began and ended, so that a stream is never
held up by one. Without an OTLP endpoint there is no Tracing at all, and the code that would write spans is passed over.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.clock import monotonic_ns

Attribute = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, Attribute]

CLOCK_READINGS = 3
"""Of both clocks, for one offset: a few microseconds."""

_propagator = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span."""

    name: str
    at_ns: int  # monotonic
    attributes: Attributes


class Tracing:
    """Writes this process's spans. Times are of its monotonic clock."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def start_server(self, name: str, traceparent: str, tracestate: str, began_ns: int) -> trace.Span:
        """Begin the span of a request from outside, below the context that it brought; without one, of a new trace."""
        parent = _propagator.extract({"traceparent": traceparent, "tracestate": tracestate})
        return self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=wall_ns(began_ns))

    def write(
        self,
        name: str,
        traceparent: str,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes,
        *,
        events: Sequence[SpanEvent] = (),
        linked: Sequence[str] = (),
        error: str = "",
    ) -> None:
        """Write a span that is over.

        Args:
            name: What it is.
            traceparent: Of its parent; empty begins a trace of its own.
            began_ns: When it began.
            ended_ns: When it ended.
            attributes: What is known of it.
            events: What happened in it.
            linked: Trace contexts of other requests that it has to do with.
            error: What went wrong, if something did.
        """
        parent = (
            _propagator.extract({"traceparent": traceparent})
            if traceparent
            else trace.set_span_in_context(trace.INVALID_SPAN)
        )
        links = [Link(context) for context in map(context_of, linked) if context.is_valid]
        # One offset for all of a span: its events lie in it, and its length is the monotonic clock's.
        offset_ns = wall_offset_ns()
        began_wall_ns = offset_ns + began_ns
        span = self._tracer.start_span(name, parent, attributes=attributes, links=links, start_time=began_wall_ns)
        for event in events:
            span.add_event(event.name, event.attributes, offset_ns + event.at_ns)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(offset_ns + ended_ns)


def context_of(traceparent: str) -> SpanContext:
    """The context that a traceparent stands for; an invalid one for what is none."""
    return trace.get_current_span(_propagator.extract({"traceparent": traceparent})).get_span_context()


def traceparent_of(context: SpanContext) -> str:
    """The header field that stands for a context."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def wall_ns(at_ns: int) -> int:
    """A time of the monotonic clock, as the time of day. Different machines' spans meet only there."""
    return wall_offset_ns() + at_ns


def wall_offset_ns() -> int:
    """What the time of day is ahead of the monotonic clock now; it changes when somebody sets the time.

    On busy cores milliseconds may pass between reading one clock and the other, by which a span would be moved against
    its neighbours. Of a few readings the one that took least is taken.
    """
    readings = []
    for _ in range(CLOCK_READINGS):
        before_ns, wall, after_ns = monotonic_ns(), time.time_ns(), monotonic_ns()
        readings.append((after_ns - before_ns, wall - before_ns))
    return min(readings)[1]
