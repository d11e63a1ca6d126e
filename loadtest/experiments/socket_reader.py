"""Reads many token streams by plain sockets, with the kernel's own time of arrival for each event.

An event loop that has two hundred sockets to read reads the last of them milliseconds after it came. The kernel stamps
what arrives (SO_TIMESTAMPNS), so the times are those of the socket, however late this process gets to it.
"""

import heapq
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from common.clock import NS_PER_S

SO_TIMESTAMPNS = 35
"""Linux's number on all common machines; Python's socket module does not name it."""
_TIMESPEC = struct.Struct("@ll")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)
_READ_BYTES = 65536
SILENCE_TIMEOUT_S = 120.0
"""Nothing on any stream for so long is an error."""


@dataclass(slots=True)
class SocketStream:
    """What came on one connection."""

    times_ns: list[int] = field(default_factory=list)  # wall clock, of each event with text, when it had arrived
    read_lags_ns: list[int] = field(default_factory=list)  # how much later this process read it
    status: int = 0
    is_done: bool = False  # it ended as a stream should


class _Connection:
    """One request, sent when made, and its answer."""

    def __init__(self, host: str, port: int, path: str, body: bytes, into: SocketStream) -> None:
        self.stream = into
        self.socket = socket.create_connection((host, port), timeout=SILENCE_TIMEOUT_S)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.socket.sendall(head.encode() + body)
        self.socket.setblocking(False)
        self._held = b""

    def read(self) -> bool:
        """Take in what there is; return whether more may come."""
        data, ancillary, _, _ = self.socket.recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
        read_ns = time.time_ns()
        arrived_ns = next((_nanoseconds(value) for level, kind, value in ancillary if _is_stamp(level, kind)), read_ns)
        self._held += data
        if not self.stream.status and b"\r\n" in self._held:
            self.stream.status = int(self._held.split(b" ", 2)[1])
        # The gateway writes an event as a whole, so no chunk's border lies within one.
        *events, self._held = self._held.split(b"\n\n")
        for event in events:
            _, found, payload = event.partition(b"data: ")
            if payload == b"[DONE]":
                self.stream.is_done = True
            elif found and any(choice["text"] for choice in msgspec.json.decode(payload)["choices"]):
                self.stream.times_ns.append(arrived_ns)
                self.stream.read_lags_ns.append(read_ns - arrived_ns)
        return bool(data)


def read_streams(url: str, path: str, bodies: Sequence[bytes], starts_s: Sequence[float]) -> list[SocketStream]:
    """POST each body to the path of an OpenAI-compatible server when its time has come, and read all answers.

    Args:
        starts_s: Of each body, from now.

    Raises:
        TimeoutError: If no stream says anything for SILENCE_TIMEOUT_S.
        OSError: If a connection fails.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    streams = [SocketStream() for _ in bodies]
    due = [(start_s, index) for index, start_s in enumerate(starts_s)]
    heapq.heapify(due)
    began_ns = time.monotonic_ns()
    with selectors.DefaultSelector() as selector:
        while due or selector.get_map():
            elapsed_s = (time.monotonic_ns() - began_ns) / NS_PER_S
            while due and due[0][0] <= elapsed_s:
                _, index = heapq.heappop(due)
                connection = _Connection(parts.hostname, parts.port, path, bodies[index], streams[index])
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            wait_s = due[0][0] - elapsed_s if due else SILENCE_TIMEOUT_S
            ready = selector.select(wait_s)
            if not ready and not due:
                raise TimeoutError(f"nothing came for {SILENCE_TIMEOUT_S:g} s")
            for key, _ in ready:
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
    return streams


def _is_stamp(level: int, kind: int) -> bool:
    return level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS


def _nanoseconds(timespec: bytes) -> int:
    seconds, nanoseconds = _TIMESPEC.unpack_from(timespec)
    return int(seconds) * NS_PER_S + int(nanoseconds)
