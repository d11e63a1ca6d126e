"""One HTTP/1.1 response, taken apart as its bytes come.

The generator speaks HTTP itself because a time must be taken at the socket read. In a general client a reader task
is woken later, after whatever else was ready, and at a thousand streams that wait would be measured as the server's.
"""

MAX_HEAD_BYTES = 64 * 1024
"""The longest status line and headers accepted; the same bound holds for trailers and a chunk's size line."""

_SIZE, _DATA, _DATA_END, _TRAILER = range(4)


class BadResponse(Exception):
    """The bytes are no HTTP/1.1 response."""


class ResponseParser:
    """Feed it what the socket gives; it returns the body."""

    def __init__(self) -> None:
        self.status = 0  # 0 until the head is complete
        self.headers: dict[str, str] = {}  # names in lower case
        self.is_complete = False
        self._buffer = b""
        self._left = 0  # bytes until the end of the body, or of the chunk
        self._is_chunked = False
        self._until_close = False
        self._state = _SIZE

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can carry another request, once this response is complete."""
        return not self._until_close and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """Return the body's bytes that data completes; often data's own payload, sometimes nothing.

        Raises:
            BadResponse: If this is no HTTP/1.1 response, or goes on after its end.
        """
        if not self.status:
            data = self._take_head(self._buffer + data)
            if not self.status:
                return b""
        if self.is_complete:
            if data:
                raise BadResponse("bytes after the end of the response")
            return b""
        if self._is_chunked:
            return self._take_chunks(data)
        return self._take_plain(data)

    def close(self) -> None:
        """The server closed the connection. Complete afterwards only if that is a proper end."""
        if self.status and self._until_close:
            self.is_complete = True

    def _take_head(self, data: bytes) -> bytes:
        while True:
            head, separator, rest = data.partition(b"\r\n\r\n")
            if not separator:
                if len(data) > MAX_HEAD_BYTES:
                    raise BadResponse("the head of the response is too long")
                self._buffer = data
                return b""
            status = self._parse_head(head)
            if status >= 200:
                break
            data = rest  # 100 Continue and the like: the real head follows.
        self._buffer = b""
        self.status = status
        self._choose_framing()
        return rest

    def _parse_head(self, head: bytes) -> int:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not code.isdigit():
            raise BadResponse("no HTTP/1.1 status line")
        self.headers = {}
        for line in lines:
            name, separator, value = line.partition(":")
            if not separator:
                raise BadResponse("a header without a colon")
            self.headers[name.strip().lower()] = value.strip()
        return int(code)

    def _choose_framing(self) -> None:
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._is_chunked = True
        elif "content-length" in self.headers:
            length = self.headers["content-length"]
            if not length.isdigit():
                raise BadResponse("a content-length that is no number")
            self._left = int(length)
            self.is_complete = self._left == 0
        elif self.status in (204, 304):
            self.is_complete = True
        else:
            self._until_close = True

    def _take_plain(self, data: bytes) -> bytes:
        if self._until_close:
            return data
        if len(data) > self._left:
            raise BadResponse("bytes after the end of the response")
        self._left -= len(data)
        self.is_complete = self._left == 0
        return data

    def _take_chunks(self, data: bytes) -> bytes:
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        body: list[bytes] = []
        at = 0
        while at < len(data):
            if self._state == _DATA:
                piece = data[at : at + self._left]
                body.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left == 0:
                    self._state = _DATA_END
                continue
            if self.is_complete:
                raise BadResponse("bytes after the end of the response")
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > MAX_HEAD_BYTES:
                    raise BadResponse("a line of the chunked body is too long")
                self._buffer = data[at:]
                break
            self._take_line(data[at:end])
            at = end + 2
        return body[0] if len(body) == 1 else b"".join(body)

    def _take_line(self, line: bytes) -> None:
        if self._state == _SIZE:
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError as error:
                raise BadResponse("a chunk whose size is no number") from error
            self._state = _DATA if self._left else _TRAILER
        elif self._state == _DATA_END:
            if line:
                raise BadResponse("a chunk longer than its size")
            self._state = _SIZE
        elif not line:
            self.is_complete = True
