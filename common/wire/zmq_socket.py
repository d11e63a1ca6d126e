"""One ZeroMQ socket of a link: how it is set up, and how it is read without a task. See zmq_link."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.wire.codec import MAX_MESSAGE_BYTES
from common.wire.session import MAX_WINDOW, Endpoint

MAX_DRAIN = 256
"""Messages read from a socket before the loop's other callbacks get a turn."""
CONTROL_ALLOWANCE = 64
"""Messages of the link itself (HELLO, Credit, Bye) that fit a socket's queue beside a full window."""
CLOSE_LINGER_MS = 200
"""How long a closed socket may go on delivering what it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKeys:
    """The CURVE key pair that all processes of one ring share (Z85, 40 characters each)."""

    public: str
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How a process's sockets behave."""

    keys: LinkKeys | None = None
    heartbeat_interval_ms: int = 500
    heartbeat_timeout_ms: int = 2000


def new_keys() -> LinkKeys:
    """Return a fresh CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return LinkKeys(public=public.decode(), secret=secret.decode())


class SocketReader:
    """Moves messages between one socket and the event loop, with no task and no wait on either side.

    A ZeroMQ descriptor is edge-triggered and any call on the socket may take the edge, so after each send the socket
    is looked at again.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_message: Callable[[list[zmq.Frame]], None],
        on_connection: Callable[[zmq.Event, int], None],
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._on_connection = on_connection
        self._loop = asyncio.get_running_loop()
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._is_drain_due = False
        self.is_closed = False
        self._loop.add_reader(socket.FD, self._drain)
        self._loop.add_reader(self._monitor.FD, self.drain_monitor)
        self._look_again()
        self._loop.call_soon(self.drain_monitor)

    def send(self, frames: list[bytes]) -> bool:
        """Whether the socket took the frames. False: its queue is full, or the peer is gone and what it said last has
        been read."""
        if self.is_closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._drain()
            return False
        finally:
            self._look_again()
        return True

    def drain_monitor(self) -> None:
        """Report every connection event that has happened so far."""
        while not self.is_closed:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = parse_monitor_message(frames)
            self._on_connection(zmq.Event(event["event"]), event["value"])

    def close(self) -> None:
        """Close the socket; what it has already taken may still leave for CLOSE_LINGER_MS."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=CLOSE_LINGER_MS)

    def _look_again(self) -> None:
        if not self._is_drain_due:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        for _ in range(MAX_DRAIN):
            if self.is_closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._on_message(frames)
        self._look_again()


def open_socket(
    context: "zmq.Context[Any]", kind: int, settings: LinkSettings, endpoint: Endpoint
) -> "zmq.Socket[bytes]":
    """Return a socket of this kind (zmq.ROUTER or zmq.DEALER) with the link's bounds, heartbeats and keys."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, MAX_WINDOW + CONTROL_ALLOWANCE)  # The peer's window decides, and is not known yet.
    socket.setsockopt(zmq.RCVHWM, endpoint.hello.window + CONTROL_ALLOWANCE)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, settings.heartbeat_interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, settings.heartbeat_timeout_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, settings.heartbeat_timeout_ms)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    if settings.keys is not None:
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, settings.keys.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, settings.keys.secret)
    return socket
