"""Everything that can go wrong with a call, in OpenAI's shape."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from common.messages.requests import CallFailed, RejectReason, RequestRejected

MAX_SHOWN_CHARS = 60
"""How much of a client's own value an error message repeats."""

ErrorCode = Literal[
    "body_timeout",
    "body_too_large",
    "internal_error",
    "invalid_api_key",
    "invalid_body",
    "invalid_json",
    "invalid_value",
    "link_full",
    "method_not_allowed",
    "missing_required_parameter",
    "model_not_found",
    "not_found",
    "queue_full",
    "queue_timeout",
    "stopping",
    "timeout",
    "too_large",
    "too_many_connections",
    "too_many_consoles",
    "unavailable",
    "unknown_parameter",
    "unsupported_content_encoding",
    "unsupported_media_type",
    "unsupported_parameter",
]
"""What clients tell errors apart by, and a label of a metric; names do not change."""


class ApiError(Exception):
    """A call failed; what the client is told, before the answer's headers or in the stream."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: ErrorCode | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self._headers = headers or {}

    @property
    def headers(self) -> dict[str, str]:
        """Header fields that the answer carries beside the usual ones."""
        headers = dict(self._headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers

    def body(self) -> bytes:
        """The error as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def bad_request(message: str, *, param: str | None = None, code: ErrorCode | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def too_many(message: str, retry_after_s: float, *, code: ErrorCode = "queue_full") -> ApiError:
    return ApiError(429, message, type="rate_limit_error", code=code, retry_after_s=retry_after_s)


def unavailable(message: str, retry_after_s: float, *, code: ErrorCode = "unavailable") -> ApiError:
    return ApiError(503, message, type="server_error", code=code, retry_after_s=retry_after_s)


def unknown_model(model: str) -> ApiError:
    return ApiError(404, f"the model {shown(model)} does not exist here", param="model", code="model_not_found")


def internal_error(message: str) -> ApiError:
    return ApiError(500, message, type="server_error", code="internal_error")


def rejection(rejected: RequestRejected | CallFailed, default_retry_after_s: float) -> ApiError:
    """The error for a request or call that the ring refused."""
    retry_after_s = rejected.retry_after_s if isinstance(rejected, RequestRejected) else None
    if retry_after_s is None:
        retry_after_s = default_retry_after_s
    match rejected.reason:
        case RejectReason.INVALID:
            return bad_request(rejected.detail, param=rejected.param or None)
        case RejectReason.TOO_LARGE:
            return bad_request(rejected.detail, param=rejected.param or None, code="too_large")
        case RejectReason.UNKNOWN_MODEL:
            return ApiError(404, rejected.detail, param="model", code="model_not_found")
        case RejectReason.QUEUE_FULL:
            return too_many(rejected.detail, retry_after_s)
        case RejectReason.QUEUE_TIMEOUT:
            return unavailable(rejected.detail, retry_after_s, code="queue_timeout")
        case RejectReason.UNAVAILABLE:
            return unavailable(rejected.detail, retry_after_s)


def shown(value: Any) -> str:
    """A client's value as an error message may repeat it: short, whatever it was."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        # Integers beyond 4300 digits have no decimal form that Python would print.
        return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_SHOWN_CHARS else value[:MAX_SHOWN_CHARS] + "…")
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
