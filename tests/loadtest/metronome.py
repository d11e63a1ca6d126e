"""A server that costs next to nothing, for finding out where the generator itself is the bottleneck.

    python -m tests.loadtest.metronome --gap-ms 50

All streams of a group get their next token on the same beat, as those of one real iteration do: one group of a
thousand is the hardest case for a client, four are four workers with 250 streams each. Speaks just enough HTTP for
that, with bytes made in advance.
"""

import argparse
import asyncio
import itertools
import sys

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"data":[{"id":"metronome"}]}'


def chunk(payload: bytes) -> bytes:
    data = b"data: " + payload + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = chunk(b'{"id":"cmpl-1","object":"text_completion","created":1,"choices":[{"index":0,"text":" word"}]}')
LAST = chunk(b'{"choices":[{"index":0,"text":" end","finish_reason":"length"}]}')


class Streams(dict[asyncio.WriteTransport, list[int]]):
    """Tokens (left, in all) of each stream."""

    def beat(self) -> None:
        for transport, counts in list(self.items()):
            counts[0] -= 1
            if counts[0]:
                transport.write(TOKEN)
                continue
            usage = chunk(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}' % counts[1])
            transport.write(LAST + usage + chunk(b"[DONE]") + b"0\r\n\r\n")
            del self[transport]


class Metronome(asyncio.Protocol):
    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0] or 0)
        if not separator or len(body) < length:
            return
        self._buffer = b""
        if head.startswith(b"GET /v1/models"):
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
        elif head.startswith(b"POST /v1/completions"):
            num_tokens = int(body.partition(b'"max_tokens":')[2].split(b",")[0])
            self._transport.write(HEAD)
            self._streams[self._transport] = [num_tokens, num_tokens]
        else:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


async def serve(options: argparse.Namespace) -> None:
    loop, groups = asyncio.get_running_loop(), [Streams() for _ in range(options.groups)]
    turns = itertools.cycle(groups)
    server = await loop.create_server(lambda: Metronome(next(turns)), "127.0.0.1", options.port, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    over = loop.run_in_executor(None, sys.stdin.read)
    due_s = loop.time()
    while not over.done():
        for group in groups:
            due_s += options.gap_ms / 1e3 / len(groups)
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            group.beat()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--gap-ms", type=float, default=50.0)
    parser.add_argument("--groups", type=int, default=1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parser.parse_args()))
