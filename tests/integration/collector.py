"""A collector that takes spans by OTLP over HTTP, in the test's own process: what real processes export, decoded."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    at_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """One span as it was exported. Ids are hexadecimal, as in a traceparent."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: list[Event]
    linked: list[tuple[str, str]]  # trace and span ids
    kind: int


@dataclass(slots=True)
class Collector:
    """What has come so far."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def of_trace(self, trace_id: str) -> dict[str, list[Span]]:
        """The spans of one trace by their names."""
        found: dict[str, list[Span]] = {}
        for span in list(self.spans):
            if span.trace_id == trace_id:
                found.setdefault(span.name, []).append(span)
        return found

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                self.spans += [_span(span, service) for span in of_scope.spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free loopback port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: pytest's output is for failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _span(span: Any, service: str) -> Span:
    return Span(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events=[Event(event.name, event.time_unix_nano, _values(event.attributes)) for event in span.events],
        linked=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        kind=span.kind,
    )


def _values(pairs: "list[KeyValue]") -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)
