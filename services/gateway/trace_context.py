"""W3C trace context: a client's is passed on, a call without one gets a fresh one."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

MAX_TRACESTATE_CHARS = 512
"""W3C asks for at least so many to be passed on."""

_propagator = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class TraceContext:
    traceparent: str
    tracestate: str = ""
    is_fresh: bool = False  # the call brought none

    @property
    def trace_id(self) -> str:
        return self.traceparent.split("-")[1]


def trace_context_of(headers: Mapping[str, str]) -> TraceContext:
    """Return the context that the header fields carry, or a fresh unsampled one where they carry none that is valid."""
    traceparent, tracestate = headers.get("traceparent", ""), headers.get("tracestate", "")
    if len(tracestate) > MAX_TRACESTATE_CHARS:
        tracestate = ""
    carried = _propagator.extract({"traceparent": traceparent, "tracestate": tracestate})
    context = trace.get_current_span(carried).get_span_context()
    if not context.is_valid:
        return TraceContext(f"00-{_random_hex(16)}-{_random_hex(8)}-00", is_fresh=True)
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return TraceContext(parent, context.trace_state.to_header())


def _random_hex(num_bytes: int) -> str:
    """Random, and not all zeros, which W3C calls invalid."""
    return (secrets.randbits(8 * num_bytes) or 1).to_bytes(num_bytes, "big").hex()
