"""How spans leave the process: a bounded queue and a thread of its own. Whatever the collector does, no stream waits.

In place of the SDK's own batch processor, which exports up to 512 spans in one go (tens of milliseconds in which the
event loop fights for the interpreter) and does not count what it drops.
"""

import sys
import threading
from collections import deque

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from prometheus_client import Counter

from common.tracing import Tracing

MAX_QUEUED_SPANS = 4096
"""A few megabytes; at 1000 spans a second, four seconds of a collector that hangs. Beyond it spans are dropped."""
BATCH_SPANS = 32
"""Encoded at a time: two milliseconds."""
EXPORT_INTERVAL_S = 0.5
EXPORT_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 3.0
"""How long the end of the process waits for what is queued."""
SWITCH_INTERVAL_S = 0.0005
"""The interpreter's, with a second thread that encodes: the event loop waits no longer for its turn."""

SPANS_EXPORTED = Counter("legato_spans_exported", "Spans that the collector took.")
SPANS_DROPPED = Counter("legato_spans_dropped", "Spans lost because the queue was full or the collector failed.")


class SpanQueue(SpanProcessor):
    """Takes spans as they end, and has a thread export them."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._spans: deque[ReadableSpan] = deque()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="span export", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing: a span counts when it ends."""

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if len(self._spans) >= MAX_QUEUED_SPANS:
            SPANS_DROPPED.inc()
        else:
            self._spans.append(span)

    def shutdown(self) -> None:
        self._is_stopping.set()
        self._thread.join(STOP_TIMEOUT_S)
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 0) -> bool:
        """Not needed here: shutdown exports what is queued."""
        return not self._spans

    def _main(self) -> None:
        while not self._is_stopping.wait(EXPORT_INTERVAL_S):
            self._export()
        self._export()

    def _export(self) -> None:
        while self._spans:
            batch = [self._spans.popleft() for _ in range(min(BATCH_SPANS, len(self._spans)))]
            if self._exporter.export(batch) is SpanExportResult.SUCCESS:
                SPANS_EXPORTED.inc(len(batch))
            else:
                SPANS_DROPPED.inc(len(batch))


class Exporting:
    """Tracing that is set up; to be closed before the process ends."""

    def __init__(self, role: str, instance_id: str, endpoint: str, trace_share: float | None) -> None:
        """
        Args:
            role: Part of service.name, unless OTEL_SERVICE_NAME says otherwise.
            instance_id: Becomes service.instance.id.
            endpoint: Where the collector takes OTLP over HTTP. Empty leaves it to OTEL_EXPORTER_OTLP_ENDPOINT.
            trace_share: Of the traces that begin here, how many are sampled; None leaves it to OTEL_TRACES_SAMPLER.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        url = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
        sampler: Sampler | None = None if trace_share is None else ParentBased(TraceIdRatioBased(trace_share))
        # Resource.create lets OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word.
        resource = Resource.create({"service.namespace": "legato", "service.instance.id": instance_id})
        # The SDK's own word for a service without a name ends with the interpreter's file name, whatever that is.
        if str(resource.attributes["service.name"]).split(":")[0] in ("", "unknown_service"):
            resource = resource.merge(Resource({"service.name": f"legato-{role}"}))
        self._provider = TracerProvider(sampler=sampler, resource=resource)
        self._provider.add_span_processor(SpanQueue(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)))
        self.tracing = Tracing(self._provider.get_tracer("legato"))

    def close(self) -> None:
        self._provider.shutdown()
