"""Around every handler: who asks, under which id, and errors in OpenAI's shape."""

import asyncio
import re
import secrets
import traceback
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from services.gateway.errors import ApiError, internal_error
from services.gateway.http.auth import KeyRing
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = "http_request_id"
"""Key of the id that a client gave its HTTP request, or that it was given, in an aiohttp request."""

TRACE_RESPONSE = "traceresponse"
"""Key of the trace context that an answer tells of, in an aiohttp request that has one."""

OPEN_PATHS = ("/health/live", "/health/ready")
"""Served without an API key: probes have none."""

CONSOLE_PATH = "/console"
"""Of the one page for browsers, which ask their user for a name and a password: any name, and an API key."""

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def common_headers(request: web.Request) -> dict[str, str]:
    """Header fields of every answer."""
    headers = {"x-request-id": request[REQUEST_ID], "Server": "legato"}
    if TRACE_RESPONSE in request:
        headers["traceresponse"] = request[TRACE_RESPONSE]
    return headers


def make_middleware(keys: KeyRing, metrics: GatewayMetrics, on_request: Callable[[web.Request], None]) -> Middleware:
    """Return the middleware of the public port. on_request hears of each request first."""

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        on_request(request)
        given_id = request.headers.get("x-request-id", "")
        request[REQUEST_ID] = given_id if _CLIENT_ID.fullmatch(given_id) else f"req-{secrets.token_hex(12)}"
        status = 499
        try:
            response = await _answered(request, handler, keys, metrics)
            status = response.status
            return response
        finally:
            metrics.call_answered(_route_of(request), status)

    return around


async def _answered(
    request: web.Request, handler: Handler, keys: KeyRing, metrics: GatewayMetrics
) -> web.StreamResponse:
    try:
        if request.path not in OPEN_PATHS:
            check = keys.check_browser if request.path.startswith(CONSOLE_PATH) else keys.check
            check(request.headers.get("Authorization", ""))
        response = await handler(request)
    except ApiError as error:
        response = error_response(request, error, metrics)
    except web.HTTPException as error:
        response = error_response(request, _as_api_error(request, error), metrics)
    except (asyncio.CancelledError, ConnectionError):
        raise  # The client has gone; there is nobody to answer.
    except Exception as error:
        # A bug. Its message may quote a prompt, so only the places are logged.
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        log.error("handler_failed", http_request_id=request[REQUEST_ID], error=type(error).__name__, places=places)
        if request.writer.output_size > 0:
            raise ConnectionResetError("a handler failed in the middle of its answer") from None
        error_told = internal_error("the server made a mistake; its log has the details")
        response = error_response(request, error_told, metrics)
    if not response.prepared:
        response.headers.update(common_headers(request))
    return response


def error_response(request: web.Request, error: ApiError, metrics: GatewayMetrics) -> web.Response:
    """The error as an answer, counted, and in the log, without its message: that may quote the client."""
    metrics.call_refused(error)
    log.info(
        "call_refused",
        http_request_id=request[REQUEST_ID],
        route=_route_of(request),
        status=error.status,
        code=error.code,
    )
    response = web.Response(
        status=error.status, body=error.body(), content_type="application/json", headers=error.headers
    )
    if "Connection" in error.headers:
        response.force_close()
    return response


def _as_api_error(request: web.Request, error: web.HTTPException) -> ApiError:
    path = request.path[:100]
    if error.status == 404:
        return ApiError(404, f"there is no {request.method} {path} here", code="not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not allowed on {path}; allowed: {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return ApiError(error.status, error.reason, type=kind)


def _route_of(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "other" if resource is None else resource.canonical
