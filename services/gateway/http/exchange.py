"""One open call as its HTTP handler sees it: waiting for the ring, and writing to a client that may be slow."""

import asyncio
import socket
from collections.abc import Callable, Iterable

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from common.clock import NS_PER_S, monotonic_ns
from services.gateway.calls import Call, Stream
from services.gateway.errors import unavailable
from services.gateway.http.stalls import StallReporter
from services.gateway.metrics import GatewayMetrics
from services.gateway.sse import HEARTBEAT

SEND_BUFFER_BYTES = 32 * 1024
"""What may lie unsent in a connection, in this process and again in the kernel; beyond it tokens coalesce here."""


class SlowClient(Exception):
    """The client left its connection full for too long, or too much waited for it."""


class Exchange:
    """Wakes a handler when its call has news, when a heartbeat is due, and when the ring has been silent too long."""

    def __init__(self, call: Call, request: web.Request, *, heartbeat_s: float, silence_timeout_s: float) -> None:
        self.call = call
        self._request = request
        self._heartbeat_s = heartbeat_s
        self._silence_timeout_s = silence_timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._try_send: Callable[[], bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent_ns = monotonic_ns()
        self._is_heartbeat_due = False
        self.is_cut = False

    def changed(self) -> None:
        """The call has news."""
        if self._waiter is None or self._waiter.done():
            return
        if self._try_send is None or self._is_heartbeat_due or self.is_cut or not self._try_send():
            self._waiter.set_result(None)

    def cut(self) -> None:
        """Close the connection now, whatever lies unsent in it."""
        self.is_cut = True
        if self._request.transport is not None:
            self._request.transport.abort()
        self.changed()

    async def wait(self, try_send: Callable[[], bool] | None = None) -> None:
        """Return when the call has news, or the timer has something to say.

        Args:
            try_send: Asked first when there is news, and as long as it returns True this goes on waiting.
        """
        self._waiter = self._loop.create_future()
        self._try_send = try_send
        try:
            await self._waiter
        finally:
            self._waiter = self._try_send = None

    async def wait_until_queued(self, timeout_s: float, retry_after_s: float) -> None:
        """Return when the ring has taken all of the call, or refused any of it.

        Raises:
            ApiError: 503, if it does neither within timeout_s.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (self.call.is_queued or self.call.is_over):
                    await self.wait()
        except TimeoutError:
            raise unavailable(
                f"the request was neither queued nor refused within {timeout_s:g} s",
                retry_after_s,
                code="queue_timeout",
            ) from None

    def start_timer(self, on_silence: Callable[[Call], None]) -> None:
        """Watch over heartbeats and silence from now on. One timer a call, moved along lazily rather than per token."""
        self._sent_ns = monotonic_ns()
        self._timer = self._loop.call_later(min(self._heartbeat_s, self._silence_timeout_s), self._tick, on_silence)

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self, on_silence: Callable[[Call], None]) -> None:
        now_ns = monotonic_ns()
        if now_ns - self.call.heard_ns >= self._silence_timeout_s * NS_PER_S:
            on_silence(self.call)
            return
        quiet_s = (now_ns - self._sent_ns) / NS_PER_S
        if quiet_s >= self._heartbeat_s:
            self._is_heartbeat_due = True
            self.changed()
            quiet_s = 0.0
        silent_s = (now_ns - self.call.heard_ns) / NS_PER_S
        delay_s = min(self._heartbeat_s - quiet_s, self._silence_timeout_s - silent_s)
        self._timer = self._loop.call_later(delay_s, self._tick, on_silence)

    def take_heartbeat(self) -> bytes:
        """A heartbeat if one is due, else nothing."""
        if not self._is_heartbeat_due:
            return b""
        self._is_heartbeat_due = False
        return HEARTBEAT

    def sent(self, now_ns: int) -> None:
        self._sent_ns = now_ns
        self._is_heartbeat_due = False


def bound_send_buffers(request: web.Request) -> None:
    """Keep what a slow reader leaves in this connection's buffers small, ours and the kernel's."""
    assert request.transport is not None
    request.transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection = request.transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, SEND_BUFFER_BYTES)


async def send(request: web.Request, writer: AbstractStreamWriter, data: bytes, timeout_s: float, call: Call) -> None:
    """Write data, and wait while the connection is full; the call hears of the waiting.

    Raises:
        SlowClient: If it stays full for timeout_s.
        ConnectionError: If the client has gone.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has gone")
    if transport.get_write_buffer_size() + len(data) <= SEND_BUFFER_BYTES:
        await writer.write(data)  # Fits below the limit, so it does not wait.
        return
    call.block(monotonic_ns())
    try:
        async with asyncio.timeout(timeout_s):
            await writer.write(data)
            await writer.drain()
    except TimeoutError:
        raise SlowClient(f"a full connection was not read for {timeout_s:g} s") from None
    finally:
        call.unblock(monotonic_ns())


def mark_sent(call: Call, fresh: Iterable[Stream], metrics: GatewayMetrics, stalls: StallReporter, now_ns: int) -> None:
    """Count the tokens of these streams that have just left."""
    blocked_ns = call.blocked_ns(now_ns)
    for stream in fresh:
        if stream.num_fresh_tokens == 0:
            continue
        metrics.tokens_sent(stream.num_fresh_tokens)
        if stream.first_token_ns == 0:
            metrics.first_token_sent(now_ns - call.arrived_ns)
        if (gap_ns := stream.mark(now_ns, blocked_ns)) is not None:
            metrics.gap_seen(gap_ns)
            if stream.stall is not None:
                stalls.report(stream.stall, call)
        if stream.held_text_ns:
            stalls.note_held_text(stream.held_text_ns - call.tbt_target_ns)
