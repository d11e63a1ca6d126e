"""Links over ZeroMQ. Only this module and zmq_socket import zmq.

An inbox is a ROUTER that any number of peers dial; a dial is a DEALER that keeps one connection open, again and again.
Losses are seen three ways: the socket monitor reports a closed connection at once; libzmq's heartbeats, which its own
thread answers while ours computes, turn silence into a closed connection after `heartbeat_timeout_ms`; a ROUTER's
send to a peer that is gone fails (ROUTER_MANDATORY).
"""

import asyncio
from typing import Any

import structlog
import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from common.clock import monotonic_ns
from common.wire.names import LookUp, leaves_loopback, look_up, name_in
from common.wire.session import Endpoint, Session
from common.wire.zmq_socket import CLOSE_LINGER_MS, LinkKeys, LinkSettings, SocketReader, open_socket

log = structlog.get_logger()

HELLO_TIMEOUT_S = 5.0
"""A peer that accepts a connection and says nothing for so long is dialled anew."""
MAX_REDIAL_S = 2.0
"""The longest pause between two attempts to reach a peer that refuses or stays away; the first is FIRST_REDIAL_S."""
FIRST_REDIAL_S = 0.1
LOOK_UP_TIMEOUT_S = 10.0
"""How long the look-up of a peer's name may take; then it is begun anew."""


class Sockets:
    """The ZeroMQ context of one process, and the sockets opened in it."""

    def __init__(self, settings: LinkSettings, look_up: LookUp = look_up) -> None:
        self._settings = settings
        self._look_up = look_up
        self._context = zmq.Context(io_threads=1)
        self._authenticator: AsyncioAuthenticator | None = None
        self._links: list[Inbox | Dial] = []

    def bind(self, address: str, endpoint: Endpoint) -> "Inbox":
        """Open the inbox at address, such as tcp://127.0.0.1:5600.

        Raises:
            OSError: If the address is taken, malformed, or leaves loopback while there are no keys.
        """
        self._check(address)
        if self._settings.keys is not None and self._authenticator is None:
            self._authenticator = self._start_authenticator(self._settings.keys)
        inbox = Inbox(self._context, self._settings, address, endpoint)
        self._links.append(inbox)
        return inbox

    def dial(self, address: str, endpoint: Endpoint) -> "Dial":
        """Keep a connection to address open until closed.

        Raises:
            OSError: If the address is malformed, or leaves loopback while there are no keys.
        """
        self._check(address)
        dial = Dial(self._context, self._settings, address, endpoint, self._look_up)
        self._links.append(dial)
        return dial

    def hang_up(self, dial: "Dial", detail: str) -> None:
        """Close one dial for good: its address is no longer a neighbour."""
        self._links.remove(dial)
        dial.close(detail)

    def close(self) -> None:
        """Say Bye on every connection and close. Waits CLOSE_LINGER_MS at most for the Byes to leave."""
        for link in self._links:
            link.close("the process stopped")
        self._links.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=CLOSE_LINGER_MS)

    def _check(self, address: str) -> None:
        if self._settings.keys is None and leaves_loopback(address):
            raise OSError(f"{address} leaves loopback, so its link needs keys: `legato keys new`, then --keys FILE")

    def _start_authenticator(self, keys: LinkKeys) -> AsyncioAuthenticator:
        class OnlyRing:
            """Lets in whoever holds the ring's own key pair."""

            def callback(self, domain: str, key: bytes) -> bool:
                return key == keys.public.encode()

        authenticator = AsyncioAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=OnlyRing())
        return authenticator


class Inbox:
    """A bound ROUTER: one Session for each connection that has said HELLO."""

    def __init__(self, context: "zmq.Context[Any]", settings: LinkSettings, address: str, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._socket = open_socket(context, zmq.ROUTER, settings, endpoint)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if settings.keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._reader = SocketReader(self._socket, self._on_message, self._on_connection)
        self._sessions: dict[bytes, Session] = {}  # by routing id, which ROUTER draws anew for each connection
        self._routing_of_fd: dict[int, bytes] = {}
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._reader.close()
            raise OSError(f"cannot bind {address}: {error}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self, detail: str) -> None:
        """Say Bye to every peer and close."""
        for session in list(self._sessions.values()):
            session.drop(detail)
        self._reader.close()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        routing_frame, *rest = frames
        if len(rest) != 1:
            return  # No peer of ours sends anything but one part.
        routing_id = routing_frame.bytes
        session = self._sessions.get(routing_id)
        if session is None:
            fd = int(rest[0].get(zmq.SRCFD))
            # Descriptors are reused: take in the end of the last connection on this one before naming the new.
            self._reader.drain_monitor()
            session = Session(
                self._endpoint,
                dialled=False,
                transmit=lambda data: self._transmit(routing_id, data),
                on_end=lambda: self._forget(routing_id),
            )
            self._sessions[routing_id] = session
            self._routing_of_fd[fd] = routing_id
        session.receive(rest[0].bytes)

    def _on_connection(self, event: zmq.Event, fd: int) -> None:
        if event is zmq.Event.DISCONNECTED and (routing_id := self._routing_of_fd.get(fd)) is not None:
            self._sessions[routing_id].end("the connection closed")

    def _transmit(self, routing_id: bytes, data: bytes) -> bool:
        return self._reader.send([routing_id, data])

    def _forget(self, routing_id: bytes) -> None:
        # What still comes on the connection meets a new Session that waits for a HELLO, and is ignored there.
        self._sessions.pop(routing_id, None)
        for fd in [fd for fd, known in self._routing_of_fd.items() if known == routing_id]:
            del self._routing_of_fd[fd]


class Dial:
    """A DEALER that connects, says HELLO, and starts again with a fresh socket whenever the connection ends.

    A fresh socket, because a DEALER keeps what it could not send and would deliver it to the peer's next life.

    A name is looked up here and never by libzmq, whose look-up holds up its I/O thread, and with that the heartbeats of
    all links: while the scheduler was away and its name with it, tokenizers lost their gateways.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        settings: LinkSettings,
        address: str,
        endpoint: Endpoint,
        look_up: LookUp = look_up,
    ) -> None:
        self._context = context
        self._settings = settings
        self._endpoint = endpoint
        self._look_up = look_up
        self.address = address
        self._name = name_in(address)
        self._looking_up: asyncio.Task[None] | None = None
        self._redial_s = FIRST_REDIAL_S
        self._opened_ns: int | None = None  # since when this connection is open
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._last_detail = ""
        self._open()

    def close(self, detail: str) -> None:
        """Say Bye and close for good."""
        self._is_closed = True
        self._stop_waiting()
        self._session.drop(detail)
        self._reader.close()

    def _open(self) -> None:
        self._timer = None
        socket = open_socket(self._context, zmq.DEALER, self._settings, self._endpoint)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(MAX_REDIAL_S * 1000))
        if self._settings.keys is not None:
            socket.setsockopt_string(zmq.CURVE_SERVERKEY, self._settings.keys.public)
        self._reader = SocketReader(socket, self._on_message, self._on_connection)
        self._session = Session(
            self._endpoint,
            dialled=True,
            transmit=lambda data: self._reader.send([data]),
            on_end=self._redial,
        )
        if self._name is None:
            self._connect(socket, self.address)
        else:
            looking_up = self._connect_to_name(socket, *self._name)
            self._looking_up = asyncio.get_running_loop().create_task(looking_up, name=f"look up {self.address}")

    def _connect(self, socket: "zmq.Socket[bytes]", address: str) -> None:
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self._reader.close()
            raise OSError(f"cannot dial {address}: {error}") from error

    async def _connect_to_name(self, socket: "zmq.Socket[bytes]", host: str, port: int) -> None:
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                address = await self._look_up(host, port)
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError.
            self._looking_up = None
            self._session.end(f"the name {host} was not resolved: {error or type(error).__name__}")
            return
        self._looking_up = None
        self._connect(socket, address)
        # libzmq would call this address for ever, while the name may by now stand for another.
        self._timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._give_up)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        was_open = self._session.is_open
        self._session.receive(frames[-1].bytes)
        if self._session.is_open and not was_open:
            self._opened_ns = monotonic_ns()
            self._last_detail = ""
            self._stop_waiting()

    def _on_connection(self, event: zmq.Event, value: int) -> None:
        match event:
            case zmq.Event.HANDSHAKE_SUCCEEDED if not self._session.is_open:
                self._session.start()
                self._stop_waiting()
                self._timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._give_up)
            case zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                self._session.end("the peer's keys do not match ours")
            case zmq.Event.DISCONNECTED:
                self._session.end("the connection closed")

    def _give_up(self) -> None:
        self._timer = None
        self._session.end(f"no HELLO within {HELLO_TIMEOUT_S:g} s")

    def _redial(self) -> None:
        """The session has ended, by whomever: start again after a pause."""
        if self._is_closed:
            return
        if self._session.end_detail != self._last_detail:
            self._last_detail = self._session.end_detail
            log.warning("link_ended", address=self.address, detail=self._last_detail)
        self._reader.close()
        self._stop_waiting()
        if self._opened_ns is not None and monotonic_ns() - self._opened_ns > MAX_REDIAL_S * 1e9:
            self._redial_s = FIRST_REDIAL_S  # A peer that lets nobody stay is asked as seldom as one that is away.
        self._opened_ns = None
        self._timer = asyncio.get_running_loop().call_later(self._redial_s, self._open)
        self._redial_s = min(2 * self._redial_s, MAX_REDIAL_S)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._looking_up is not None:
            self._looking_up.cancel()
            self._looking_up = None
