"""The admin port of a process: health that tells the truth, and metrics."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

SHUTDOWN_S = 1.0
"""How long answers that go on and on may take to end when the process stops."""


class Readiness:
    """Whether a process can do its work now, and if not, why."""

    def __init__(self) -> None:
        self._reason = "starting"

    @property
    def is_ready(self) -> bool:
        return not self._reason

    @property
    def reason(self) -> str:
        """What is missing; empty when ready."""
        return self._reason

    def set_ready(self) -> None:
        self._reason = ""

    def set_not_ready(self, reason: str) -> None:
        assert reason, "a process that is not ready says why"
        self._reason = reason


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AdminServer:
    """Serves /health/live, /health/ready and /metrics, and pages of the process's own."""

    def __init__(self, host: str, port: int, readiness: Readiness) -> None:
        self._host = host
        self._port = port
        app = web.Application()
        self.pages: dict[str, Handler] = {}  # by name, the path without its slash; may be added at any time
        add_health_routes(app, readiness)
        app.router.add_get("/{page}", self._page)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        self.url = ""

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: If the port is taken.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _page(self, request: web.Request) -> web.StreamResponse:
        handler = self.pages.get(request.match_info["page"])
        if handler is None:
            raise web.HTTPNotFound(
                text=f"known here: {', '.join(('health/live', 'health/ready', 'metrics', *self.pages))}\n"
            )
        return await handler(request)


def add_health_routes(app: web.Application, readiness: Readiness) -> None:
    """Add the three routes to an application. Liveness says only that the event loop turns."""

    async def live(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(_: web.Request) -> web.Response:
        if readiness.is_ready:
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "not ready", "reason": readiness.reason}, status=503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app.router.add_get("/health/live", live)
    app.router.add_get("/health/ready", ready)
    app.router.add_get("/metrics", metrics)
