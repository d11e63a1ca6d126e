"""The public port: routes, and the connections that reach them."""

import asyncio
import logging
from typing import cast

from aiohttp import web

from common.admin import add_health_routes
from services.gateway.errors import ApiError, unavailable
from services.gateway.http.body import check_length
from services.gateway.http.console import ConsoleRoutes
from services.gateway.http.gateway import Gateway
from services.gateway.http.generation import GenerationRoutes
from services.gateway.http.middleware import CONSOLE_PATH, make_middleware
from services.gateway.http.tokens import TokenRoutes

BACKLOG = 1024
"""Connections that the kernel holds for us to accept."""
LINGER_S = 5.0
"""How long what a refused client still sends is read and thrown away, so that it gets to read its answer."""
CLOSE_S = 2.0
"""How long handlers that are still there after the drain may take to end."""


class _PlacesOnly(logging.Filter):
    """Strips exceptions from aiohttp's own log: those of a broken request quote it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0] is not None:
            record.msg = f"{record.getMessage()}: {record.exc_info[0].__name__}"
            record.args = ()
        record.exc_info = None
        return True


class HttpServer:
    """Listens, bounds the number of connections, and hands requests to the routes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._config = gateway.config
        middleware = make_middleware(gateway.keys, gateway.metrics, self._on_request)
        app = web.Application(middlewares=[middleware])
        self._add_routes(app)
        logger = logging.getLogger("legato.http")
        logger.addFilter(_PlacesOnly())
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=logger,
            handler_cancellation=True,  # A closed connection cancels its handler, which cancels its requests.
            keepalive_timeout=self._config.keep_alive_s,
            auto_decompress=False,  # Compressed bodies are refused, not unpacked.
            shutdown_timeout=CLOSE_S,
            lingering_time=LINGER_S,
        )
        self._listener: asyncio.Server | None = None
        self._silent: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}  # connections without a request yet
        self._num_arriving = 0
        self.url = ""

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: If the port is taken.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        self._gateway.metrics.connections.set_function(self._num_connections)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, self._config.host, self._config.port, backlog=BACKLOG)
        host, port = self._listener.sockets[0].getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stop_listening(self) -> None:
        """Take no new connections; those that are open go on."""
        if self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        """Close every connection, and cancel the handlers that are still there."""
        self.stop_listening()
        for timer in self._silent.values():
            timer.cancel()
        await self._runner.cleanup()

    def _add_routes(self, app: web.Application) -> None:
        generation, tokens = GenerationRoutes(self._gateway), TokenRoutes(self._gateway)
        for path, handler in (
            ("/v1/completions", generation.completions),
            ("/v1/chat/completions", generation.chat),
            ("/tokenize", tokens.tokenize),
            ("/detokenize", tokens.detokenize),
        ):
            app.router.add_post(path, handler, expect_handler=self._on_expect)
        app.router.add_get("/v1/models", tokens.models)
        app.router.add_get("/v1/models/{model:.+}", tokens.model)
        console = ConsoleRoutes(self._gateway)
        app.router.add_get(CONSOLE_PATH, console.page)
        app.router.add_get(f"{CONSOLE_PATH}/feed", console.feed)
        add_health_routes(app, self._gateway.readiness)

    async def _on_expect(self, request: web.Request) -> web.StreamResponse | None:
        """A client asks before it sends its body: say no at once to one that is too large."""
        if request.headers.get("Expect", "").lower() != "100-continue":
            raise web.HTTPExpectationFailed(text="only 100-continue is known")
        try:
            self._gateway.keys.check(request.headers.get("Authorization", ""))
            check_length(request, self._config.max_body_bytes)
        except ApiError:
            return None  # Without the 100; the handler meets the same error and says so properly.
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
        return None

    def _on_request(self, request: web.Request) -> None:
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()

    def _num_connections(self) -> int:
        return 0 if self._runner.server is None else len(self._runner.server.connections)

    def _accept(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        if self._num_connections() + self._num_arriving >= self._config.max_connections:
            message = f"{self._config.max_connections} connections are open; this server takes no more"
            error = unavailable(message, 1, code="too_many_connections")
            self._gateway.metrics.call_refused(error)
            return _Refusal(error)
        assert self._runner.server is not None
        protocol = self._runner.server()
        loop = asyncio.get_running_loop()
        # The server counts a connection from the loop's next turn on; several may be accepted in one.
        self._num_arriving += 1
        loop.call_soon(self._arrived)
        if len(self._silent) > 2 * self._config.max_connections:
            self._forget_closed()
        timeout_s = self._config.first_request_timeout_s
        self._silent[protocol] = loop.call_later(timeout_s, self._close_silent, protocol)
        return protocol

    def _forget_closed(self) -> None:
        """Connections that came and went without a word: their timers need not be waited for."""
        assert self._runner.server is not None
        for protocol in self._silent.keys() - set(self._runner.server.connections):
            self._silent.pop(protocol).cancel()

    def _arrived(self) -> None:
        self._num_arriving -= 1

    def _close_silent(self, protocol: web.RequestHandler) -> None:
        self._silent.pop(protocol, None)
        protocol.force_close()


class _Refusal(asyncio.Protocol):
    """Tells a connection too many that it is one, and closes it."""

    def __init__(self, error: ApiError) -> None:
        self._error = error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it.
        body = self._error.body()
        fields = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self._error.headers,
            "Connection": "close",
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\n" + head.encode() + b"\r\n" + body)
        transport.close()
