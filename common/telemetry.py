"""Logs: structlog events, a past-tense name plus fields, one line each on standard error. And whether spans leave."""

import logging
import os
import sys
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from common.tracing_export import Exporting


def set_up_logging(role: str, instance_id: str, level: str, log_format: str) -> None:
    """Configure structlog for this process.

    Args:
        role: Bound to every line, with instance_id.
        instance_id: See common.ids.InstanceId.
        level: debug, info, warning or error.
        log_format: json, or text for people.
    """
    is_text = log_format == "text"
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if not is_text else "%H:%M:%S.%f", utc=not is_text),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
            if is_text
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # A line is one write, also where Python does not buffer: processes that share a log do not tear each other's.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role, instance=instance_id)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")


def start_exporting(role: str, instance_id: str, endpoint: str, trace_share: float | None) -> "Exporting | None":
    """Begin to export spans, if an endpoint is given or the standard variables of OpenTelemetry name one.

    Raises:
        OSError: If the packages of legato[tracing] are not installed.
    """
    environ = os.environ
    named = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not (endpoint or named) or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        # The SDK is an extra, and takes a tenth of a second to import.
        from common.tracing_export import Exporting  # noqa: PLC0415
    except ImportError as error:
        raise OSError(f"an OTLP endpoint is given, but legato[tracing] is not installed: {error}") from error
    return Exporting(role, instance_id, endpoint, trace_share)
