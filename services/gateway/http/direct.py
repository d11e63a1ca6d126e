"""The short way from the ring to a client that keeps up: written where the tokens arrive, with no task woken for them.

A handler that is woken for each token goes down and up through a dozen coroutines (aiohttp's, the middleware's, ours),
which was half of what a token cost the gateway. So while a handler waits and its connection is empty, what comes is
rendered and written by the ring's own task. All that is not plain progress (ends, failures, heartbeats, a connection
that still holds something) stays the handler's.
"""

import asyncio

from aiohttp import web
from aiohttp.http import StreamWriter

from common.clock import monotonic_ns
from services.gateway.calls import Call
from services.gateway.http.exchange import Exchange, mark_sent
from services.gateway.http.stalls import StallReporter
from services.gateway.metrics import GatewayMetrics
from services.gateway.sse import EventWriter

MAX_DIRECT_BYTES = 4096
"""Text that may be written so; as events, and with characters escaped, it stays far below what a connection holds."""


class DirectPath:
    """Of one streaming call."""

    def __init__(
        self,
        request: web.Request,
        writer: StreamWriter,
        exchange: Exchange,
        events: EventWriter,
        metrics: GatewayMetrics,
        stalls: StallReporter,
    ) -> None:
        self._transport: asyncio.Transport | None = request.transport
        self._writer = writer
        self._exchange = exchange
        self._call: Call = exchange.call
        self._events = events
        self._metrics = metrics
        self._stalls = stalls

    def try_send(self) -> bool:
        """Write what the call has now; False: nothing was taken, and the handler must see to it."""
        call, transport = self._call, self._transport
        if call.is_over or call.unsent_bytes > MAX_DIRECT_BYTES:
            return False
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        fresh = call.take_fresh()
        if data := self._events.render(fresh):
            _write_now(self._writer, data)
        now_ns = monotonic_ns()
        if data:
            self._exchange.sent(now_ns)
        mark_sent(call, fresh, self._metrics, self._stalls, now_ns)
        return True


def _write_now(writer: StreamWriter, data: bytes) -> None:
    """aiohttp's own framing, without its wait: told not to drain, its write has nothing to wait for."""
    writing = writer.write(data, drain=False)
    try:
        writing.send(None)
    except StopIteration:
        return
    raise AssertionError("a write that does not drain has waited")
