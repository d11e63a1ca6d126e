"""Requests to one server, over connections that are kept and used again.

A read is stamped before anything is done with it: sockets that are ready get their times first, and only then are
their bytes looked at, a few at a time. So the cost of parsing one stream does not show in the time of another.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import urlsplit

import msgspec

from common.clock import monotonic_ns
from loadtest.http1 import BadResponse, ResponseParser
from loadtest.records import CUT, RequestRecord
from loadtest.sse import DONE, BadEvent, EventSplitter, parse_event

MAX_IDLE_CONNECTIONS = 4096
MAX_RESENDS = 1
"""A kept connection may have been closed by the server the moment we use it: then once more, on a new one."""
DIGEST_BURST = 32
"""Pieces looked at in a row: below a millisecond in all, which bounds how late another socket's stamp can be."""
MAX_UNDIGESTED = 20_000
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""The longest answer that is not a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 300.0  # from start to end of one request


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response that is no stream."""

    status: int
    body: bytes


class RequestFailed(Exception):
    """The world failed; kind is a short stable word for counting."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class _Sink(Protocol):
    """Takes one response."""

    def take(self, parser: ResponseParser, body: bytes, now_ns: int) -> None: ...


class Client:
    """Speaks to the server at base_url. Use as an async context manager."""

    def __init__(self, base_url: str, api_key: str = "", limits: ClientLimits | None = None) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is no address of a server; write http://HOST:PORT")
        self._limits = limits or ClientLimits()
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        # People write the base URL with and without the version.
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\nUser-Agent: legato-load\r\n{authorization}"
        self._addresses: deque[str] = deque()
        self._intake = _Intake()
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def call(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Send one request and return its whole answer.

        Raises:
            RequestFailed: If no answer came.
        """
        sink = _AnswerSink()
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                parser = await self._exchange(self._encode(method, path, body), sink, lambda now_ns: None)
        except TimeoutError as error:
            raise RequestFailed("timeout") from error
        return Answer(parser.status, b"".join(sink.parts))

    async def stream(self, path: str, body: bytes, record: RequestRecord, keep_text: bool = False) -> str:
        """Send one streaming request and fill in its record, whatever comes of it; return the text if asked to.

        A cancelled stream's record says that it was cut; its connection is closed.
        """

        def sent(now_ns: int) -> None:
            record.sent_ns = now_ns

        sink = _StreamSink(record, keep_text)
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                await self._exchange(self._encode("POST", path, body), sink, sent)
            record.error = sink.verdict()
        except TimeoutError:
            record.error = "timeout"
        except RequestFailed as failure:
            record.error = failure.kind
        except asyncio.CancelledError:
            record.error = CUT
            raise
        finally:
            # The end is the last event's, not that of our own awakening.
            record.ended_ns = sink.last_ns if record.is_ok else monotonic_ns()
            record.settle()
        return "".join(sink.text)

    def _encode(self, method: str, path: str, body: bytes) -> bytes:
        kind = "Content-Type: application/json\r\n" if body else ""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{kind}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def _exchange(self, request: bytes, sink: _Sink, sent: Callable[[int], None]) -> ResponseParser:
        for resends_left in range(MAX_RESENDS, -1, -1):
            is_used = bool(self._idle) and resends_left > 0
            connection = self._idle.pop() if is_used else await self._connect()
            try:
                sent(monotonic_ns())
                parser = await connection.exchange(request, sink)
            except _Stale as error:
                if is_used:
                    continue
                raise RequestFailed("disconnected") from error
            except BaseException:
                connection.close()
                raise
            if parser.keeps_alive and connection.is_open and len(self._idle) < MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
            else:
                connection.close()
            return parser
        raise AssertionError("the last round returns or raises")

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                if not self._addresses:  # Once: a look-up per request would time the resolver.
                    found = await loop.getaddrinfo(self._host, self._port, type=1)
                    self._addresses.extend(dict.fromkeys(str(entry[4][0]) for entry in found))
                self._addresses.rotate(-1)  # Several replicas behind one name each get their share.
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._intake, self._idle),
                    self._addresses[-1],
                    self._port,
                    ssl=self._ssl,
                    server_hostname=self._host if self._ssl else None,
                )
        except TimeoutError as error:
            raise RequestFailed("connect_timeout") from error
        except OSError as error:
            raise RequestFailed("connect_failed") from error
        return connection


class _Stale(Exception):
    """The connection closed before a byte of the response."""


class _Intake:
    """What the sockets gave, with its time, until there is leisure to look at it.

    A few pieces are digested in each turn of the event loop. Between them the loop reads, and so stamps, whatever has
    arrived meanwhile: when a thousand streams get a token at once, the last one's time is not that of its parsing.
    """

    def __init__(self) -> None:
        self._arrived: deque[tuple[_Connection, int, bytes | None]] = deque()

    def add(self, connection: "_Connection", data: bytes | None) -> None:
        """Keep data (None: the connection is lost) until its turn."""
        self._arrived.append((connection, monotonic_ns(), data))
        if len(self._arrived) == 1:
            asyncio.get_running_loop().call_soon(self._digest)

    def _digest(self) -> None:
        arrived = self._arrived
        # Beyond the bound all is digested in one go. That holds up the loop, which the lag probe sees.
        burst = DIGEST_BURST if len(arrived) <= MAX_UNDIGESTED else len(arrived)
        for _ in range(min(burst, len(arrived))):
            connection, now_ns, data = arrived[0]
            try:
                connection.digest(data, now_ns)
            finally:
                arrived.popleft()
        if arrived:
            asyncio.get_running_loop().call_soon(self._digest)


class _Connection(asyncio.Protocol):
    """One connection; carries one exchange at a time."""

    def __init__(self, intake: _Intake, idle: "list[_Connection]") -> None:
        self._intake = intake
        self._idle = idle
        self._transport: asyncio.WriteTransport | None = None
        self._parser: ResponseParser | None = None
        self._sink: _Sink | None = None
        self._done: asyncio.Future[ResponseParser] | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        self._finish(None)
        if self._transport is not None:
            self._transport.abort()  # Nothing of ours waits to be written, and a cut stream's rest is not wanted.

    async def exchange(self, request: bytes, sink: _Sink) -> ResponseParser:
        if not self.is_open or self._transport is None:
            raise _Stale
        self._parser, self._sink = ResponseParser(), sink
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass of asyncio's.

    def data_received(self, data: bytes) -> None:
        self._intake.add(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._intake.add(self, None)

    def digest(self, data: bytes | None, now_ns: int) -> None:
        """Deal with what was read at now_ns."""
        parser, sink = self._parser, self._sink
        if parser is None or sink is None:
            # Idle: a server says nothing unasked, so this is its farewell.
            if self in self._idle:
                self._idle.remove(self)
            self.close()
            return
        if data is None:
            self._digest_loss(parser)
            return
        try:
            body = parser.feed(data)
            if parser.status and (body or parser.is_complete):
                sink.take(parser, body, now_ns)
        except (BadResponse, BadEvent):
            self._finish(RequestFailed("bad_response"))
            return
        except RequestFailed as failure:
            self._finish(failure)
            return
        if parser.is_complete:
            self._finish(None)

    def _digest_loss(self, parser: ResponseParser) -> None:
        parser.close()
        if parser.is_complete:
            self._finish(None)
        else:
            self._finish(RequestFailed("disconnected") if parser.status else _Stale())

    def _finish(self, error: Exception | None) -> None:
        done, parser = self._done, self._parser
        self._done = self._parser = self._sink = None
        if done is None or parser is None or done.done():
            return
        if error is None:
            done.set_result(parser)
        else:
            done.set_exception(error)


@dataclass(slots=True)
class _AnswerSink:
    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0

    def take(self, parser: ResponseParser, body: bytes, now_ns: int) -> None:
        self.num_bytes += len(body)
        if self.num_bytes > MAX_ANSWER_BYTES:
            raise RequestFailed("bad_response")
        self.parts.append(body)


class _ErrorBody(msgspec.Struct):
    code: str | int | None = None
    type: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody


class _StreamSink:
    """Turns a stream's bytes into times in a record."""

    def __init__(self, record: RequestRecord, keep_text: bool) -> None:
        self.last_ns = 0
        self.text: list[str] = []
        self._record = record
        self._keep_text = keep_text
        self._splitter = EventSplitter()
        self._other = _AnswerSink()
        self._status = 0
        self._is_done = False
        self._has_failed = False

    def take(self, parser: ResponseParser, body: bytes, now_ns: int) -> None:
        self.last_ns = now_ns
        self._status = parser.status
        if parser.status != 200:
            self._other.take(parser, body, now_ns)
            return
        for data in self._splitter.feed(body):
            if data == DONE:
                self._is_done = True
            else:
                self._take_event(data, now_ns)

    def verdict(self) -> str:
        """The error's kind once the response is complete; empty if all is well."""
        if self._status != 200:
            return f"http_{self._status}{self._code()}"
        if self._has_failed:
            return "server_error"
        if not self._is_done and not self._record.finish_reason:
            return "truncated"
        if not self._record.chunk_ns:
            return "no_tokens"
        return ""

    def _take_event(self, data: bytes, now_ns: int) -> None:
        record = self._record
        event = parse_event(data)
        if event.is_error:
            self._has_failed = True
        if event.text or event.num_tokens:
            record.chunk_ns.append(now_ns)
            record.num_ids += event.num_tokens
            if self._keep_text and event.text:
                self.text.append(event.text)
        elif event.may_hold_token:
            record.silent_ns.append(now_ns)
        if event.finish_reason:
            record.finish_reason = event.finish_reason
        if event.prompt_tokens is not None:
            record.num_prompt_tokens = event.prompt_tokens
        if event.completion_tokens is not None:
            record.num_output_tokens = event.completion_tokens

    def _code(self) -> str:
        """The error's code or type, never its message: that may repeat the prompt."""
        try:
            error = msgspec.json.decode(b"".join(self._other.parts), type=_ErrorAnswer).error
        except msgspec.DecodeError:
            return ""
        word = error.code if isinstance(error.code, str) else error.type
        return f":{word[:60]}" if word else ""
