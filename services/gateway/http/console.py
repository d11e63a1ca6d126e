"""/console: what the system does now, as one page that follows it live.

The page is a file; its feed is /console/feed, server-sent events. What schedulers do comes from their admin ports and
is passed on as it is; what clients saw is this gateway's own. While nobody looks, no connection is open and nothing is
gathered.
"""

import asyncio
from importlib.resources import files

import aiohttp
import msgspec
import structlog
from aiohttp import web
from aiohttp.http import HttpVersion11

from common.clock import monotonic_ns, ms
from services.gateway.account import Stall
from services.gateway.calls import Phase, Stream
from services.gateway.errors import unavailable
from services.gateway.http.gateway import Gateway

log = structlog.get_logger()

MAX_VIEWERS = 8
"""Feeds at a time; one more gets a 503."""
MAX_STREAMS_SHOWN = 40
"""The streams with the largest gaps, where there are more."""
TELL_S = 0.5
"""Between two tellings of the gateway's streams."""
RETRY_S = 2.0
"""Pause before a scheduler that does not answer is asked again."""
SILENCE_S = 10.0
"""A scheduler's feed that says nothing for so long is taken up anew."""
MAX_QUEUED = 64
"""Events that may wait for a viewer who reads slowly; more are dropped, oldest first."""
LEAST_PART_NS = 100_000
"""Parts of a stall below a tenth of a millisecond are not shown."""
MAX_EVENT_BYTES = 1 << 20
"""Of one event of a scheduler."""
SEND_TIMEOUT_S = 10.0
"""A viewer who reads nothing for so long is let go."""

PAGE = files("services.gateway.console").joinpath("index.html")
CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
"""The page may fetch from here and from nowhere else."""


class StreamShown(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    phase: str
    num_tokens: int
    since_ms: float  # since its last token, or since it arrived
    last_gap_ms: float | None
    max_gap_ms: float | None
    ttft_ms: float | None


class StallShown(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    ago_ms: float
    gap_ms: float
    target_ms: float
    cause: str
    parts_ms: dict[str, float]  # the largest first; what takes no time is left out
    culprits: tuple[str, ...]  # requests whose prefill lay in the gap


class GatewayShown(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway tells itself; an event named `gateway`."""

    num_open: int
    num_pools: int
    streams: tuple[StreamShown, ...]
    stalls: tuple[StallShown, ...]  # the latest first


class ConsoleRoutes:
    """The page and its feed."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._num_viewers = 0
        self._page = PAGE.read_bytes()

    async def page(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"}
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=headers)

    async def feed(self, request: web.Request) -> web.StreamResponse:
        if self._num_viewers >= MAX_VIEWERS:
            raise unavailable(f"{MAX_VIEWERS} consoles are open already", 10, code="too_many_consoles")
        self._num_viewers += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        events = _Events()
        tasks = [asyncio.create_task(self._tell_streams(events), name="console streams")]
        tasks += [
            asyncio.create_task(_follow(url, index, events), name=f"console {url}")
            for index, url in enumerate(self._gateway.config.scheduler_admin)
        ]
        if request.version < HttpVersion11:
            response.force_close()
        try:
            await response.prepare(request)
            while not self._gateway.is_stopping:
                data = await events.take()
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await response.write(data)
        except TimeoutError:
            log.info("console_viewer_let_go", after_s=SEND_TIMEOUT_S)
        finally:
            self._num_viewers -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return response

    async def _tell_streams(self, events: "_Events") -> None:
        while True:
            events.put("gateway", msgspec.json.encode(self._shown()))
            await asyncio.sleep(TELL_S)

    def _shown(self) -> GatewayShown:
        now_ns = monotonic_ns()
        streams = sorted(self._gateway.open_streams(), key=lambda stream: -stream.tbt_max_ns)
        return GatewayShown(
            num_open=len(streams),
            num_pools=len(self._gateway.config.scheduler_admin),
            streams=tuple(_stream_shown(stream, now_ns) for stream in streams[:MAX_STREAMS_SHOWN]),
            stalls=tuple(_stall_shown(stall, now_ns) for stall in reversed(self._gateway.stalls.latest)),
        )


class _Events:
    """What waits for one viewer."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_QUEUED)

    def put(self, name: str, data: bytes) -> None:
        if self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(b"event: %b\ndata: %b\n\n" % (name.encode(), data))

    async def take(self) -> bytes:
        return await self._queue.get()


async def _follow(url: str, index: int, events: _Events) -> None:
    """Pass a scheduler's feed on, as events named `pool-INDEX`; say when it does not answer, and try again."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=MAX_EVENT_BYTES) as session:
        while True:
            try:
                async with session.get(f"{url.rstrip('/')}/watch") as answer:
                    answer.raise_for_status()
                    async for line in answer.content:
                        if line.startswith(b"data: "):
                            events.put(f"pool-{index}", line[6:].rstrip())
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                problem = {"index": index, "error": type(error).__name__}
                events.put("lost", msgspec.json.encode(problem))
            await asyncio.sleep(RETRY_S)


def _stall_shown(stall: Stall, now_ns: int) -> StallShown:
    parts = sorted(stall.account.parts().items(), key=lambda part: -abs(part[1]))
    return StallShown(
        request_id=stall.request_id,
        ago_ms=ms(now_ns - stall.at_ns),
        gap_ms=ms(stall.gap_ns),
        target_ms=ms(stall.target_ns),
        cause=stall.cause,
        parts_ms={name: round(ms(part_ns), 1) for name, part_ns in parts if abs(part_ns) >= LEAST_PART_NS},
        culprits=tuple(culprit.request_id for culprit in stall.account.worker.culprits),
    )


def _stream_shown(stream: Stream, now_ns: int) -> StreamShown:
    has_token = stream.first_token_ns > 0
    has_gap = stream.last_token_ns > stream.first_token_ns
    since_ns = stream.last_token_ns if has_token else stream.call.arrived_ns
    return StreamShown(
        request_id=stream.request_id,
        phase=Phase(stream.phase).name.lower(),
        num_tokens=len(stream.token_ids),
        since_ms=ms(now_ns - since_ns),
        last_gap_ms=ms(stream.last_gap_ns) if has_gap else None,
        max_gap_ms=ms(stream.tbt_max_ns) if has_gap else None,
        ttft_ms=ms(stream.first_token_ns - stream.call.arrived_ns) if has_token else None,
    )
