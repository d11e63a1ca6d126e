"""Reading a request's body: of the right type, within a bound, in bounded time."""

import asyncio

from aiohttp import web

from services.gateway.errors import ApiError, bad_request


async def read_json_bytes(request: web.Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Return the body of a JSON request. Holds no more than max_bytes and one read of it.

    Raises:
        ApiError: 415 for another type or encoding, 413 beyond max_bytes, 408 beyond timeout_s, 400 for a broken one.
    """
    check_type(request)
    check_length(request, max_bytes)
    received = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for data in request.content.iter_any():
                received += data
                if len(received) > max_bytes:
                    raise too_large(len(received), max_bytes)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {timeout_s:g} s; {len(received)} bytes did",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None
    except web.RequestPayloadError as error:
        raise bad_request(f"the body is broken: {error}", code="invalid_body") from None
    return bytes(received)


def check_type(request: web.Request) -> None:
    """
    Raises:
        ApiError: 415, if the body is no plain UTF-8 JSON.
    """
    stated = request.headers.get("Content-Type", "")
    charset = (request.charset or "utf-8").lower().replace("_", "-")
    if not stated or request.content_type != "application/json" or charset not in ("utf-8", "utf8", "us-ascii"):
        seen = f"it was {stated[:60]!r}" if stated else "there was none"
        raise ApiError(415, f"Content-Type must be application/json in UTF-8; {seen}", code="unsupported_media_type")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"Content-Encoding {encoding[:60]!r} is not supported", code="unsupported_content_encoding")


def check_length(request: web.Request, max_bytes: int) -> None:
    """
    Raises:
        ApiError: 413, if the length that the client states is above max_bytes.
    """
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large(request.content_length, max_bytes)


def too_large(num_bytes: int, max_bytes: int) -> ApiError:
    # The rest of the body is not worth reading, so the connection cannot be used again.
    return ApiError(
        413,
        f"the body has {num_bytes} bytes or more; this server takes at most {max_bytes}",
        code="body_too_large",
        headers={"Connection": "close"},
    )
