"""What all handlers share: the ring, the open calls, and the bounds."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web

from common.admin import Readiness
from common.clock import monotonic_ns
from common.injection import Delays
from common.messages.links import Hello
from common.tracing import Tracing
from common.wire.zmq_link import Sockets
from services.gateway.api.json_body import decode_object
from services.gateway.calls import Call, Stream
from services.gateway.config import GatewayConfig, read_api_keys
from services.gateway.core import StreamCore
from services.gateway.errors import too_many, unavailable
from services.gateway.http.auth import KeyRing
from services.gateway.http.body import read_json_bytes
from services.gateway.http.exchange import Exchange
from services.gateway.http.stalls import StallReporter
from services.gateway.metrics import GatewayMetrics
from services.gateway.ring import Ring

MAX_INLINE_BYTES = 64 * 1024
"""A larger body is checked in a thread, so that streams do not wait for it: 4 MiB take tens of milliseconds."""

BodyT = TypeVar("BodyT")


class Gateway:
    """One gateway: its core, its ring, and an exchange for each open call."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        sockets: Sockets,
        hello: Hello,
        readiness: Readiness,
        metrics: GatewayMetrics,
        tracing: Tracing | None = None,
    ) -> None:
        """
        Raises:
            OSError: If the file of API keys cannot be read or holds none.
        """
        self.config = config
        self.metrics = metrics
        self.tracing = tracing
        self.readiness = readiness
        self.keys = KeyRing(read_api_keys(config))
        self.started_s = int(time.time())
        self.is_stopping = False
        self.stalls = StallReporter(max_lines_per_s=config.max_stall_lines_per_s)
        metrics.count_stalls(self.stalls.counts)
        self._parser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parser")
        self._exchanges: dict[str, Exchange] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._core = StreamCore(retry_after_s=config.retry_after_s)
        metrics.open_requests.set_function(lambda: self._core.num_open)
        self.ring = Ring(
            sockets,
            hello,
            self._core,
            addresses=config.tokenizers,
            resolve_interval_s=config.resolve_interval_s,
            retry_after_s=config.retry_after_s,
            on_changed=self._on_changed,
            on_cut=self._on_cut,
            on_cards=self.update_readiness,
            delays=Delays(config.inject_delay),
        )
        self.update_readiness()

    async def read(self, request: web.Request, parse: Callable[[dict[str, Any]], BodyT]) -> BodyT:
        """Return the request's body, checked.

        Raises:
            ApiError: What is wrong with it.
        """
        config = self.config
        data = await read_json_bytes(request, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
        if len(data) <= MAX_INLINE_BYTES:
            return parse(decode_object(data))
        return await asyncio.get_running_loop().run_in_executor(self._parser, lambda: parse(decode_object(data)))

    def check_room(self, num_requests: int) -> None:
        """
        Raises:
            ApiError: 503 if the process is about to stop, 429 if so many requests would be too many.
        """
        if self.is_stopping:
            raise unavailable("this server is stopping", self.config.retry_after_s, code="stopping")
        num_open, most = self._core.num_open, self.config.max_open_requests
        if num_open + num_requests > most:
            raise too_many(
                f"{num_open} requests are open and {num_requests} more came; this server takes {most} at a time",
                self.config.retry_after_s,
            )

    def add(self, exchange: Exchange) -> None:
        self._exchanges[exchange.call.call_id] = exchange
        self._idle.clear()

    def remove(self, exchange: Exchange) -> None:
        """The exchange is over, however it ended; what still runs of its call is cancelled."""
        call, now_ns = exchange.call, monotonic_ns()
        if num_open := sum(stream.request_id in self._core for stream in call.streams):
            self.metrics.cancelled(num_open)
        for stream in call.streams:
            has_gap = stream.first_token_ns != stream.last_token_ns
            self.metrics.stream_ended(now_ns - call.arrived_ns, stream.tbt_max_ns if has_gap else None)
        self.ring.close(call)
        del self._exchanges[exchange.call.call_id]
        if not self._exchanges:
            self._idle.set()

    def open_streams(self) -> list[Stream]:
        """Those without a terminal; for showing."""
        return self._core.open_streams()

    def update_readiness(self) -> None:
        """Ready is: some tokenizer knows a pool that has workers."""
        cards = self.ring.cards().values()
        if self.is_stopping:
            self.readiness.set_not_ready("stopping")
        elif any(card.num_workers for card in cards):
            self.readiness.set_ready()
        else:
            self.readiness.set_not_ready("no worker serves a model" if cards else "no tokenizer is connected")

    async def drain(self) -> None:
        """Take nothing new; let open calls finish for drain_s, then fail what is left, and see it go."""
        self.is_stopping = True
        self.update_readiness()
        for bound_s in (self.config.drain_s, self.config.send_timeout_s):
            try:
                async with asyncio.timeout(bound_s):
                    await self._idle.wait()
                    return
            except TimeoutError:
                error = unavailable("this server is stopping", self.config.retry_after_s, code="stopping")
                for exchange in list(self._exchanges.values()):
                    self.ring.fail(exchange.call, error)

    def on_silence(self, call: Call) -> None:
        bound_s = self.config.silence_timeout_s
        self.ring.fail(
            call, unavailable(f"no word of this request for {bound_s:g} s", self.config.retry_after_s, code="timeout")
        )

    def _on_changed(self, call: Call) -> None:
        if (exchange := self._exchanges.get(call.call_id)) is not None:
            exchange.changed()

    def _on_cut(self, call: Call) -> None:
        if (exchange := self._exchanges.get(call.call_id)) is not None:
            exchange.cut()
