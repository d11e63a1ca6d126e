"""A foreign server: OpenAI's API over real HTTP, with delays that a test scripts, and a book of when it sent what.

`python -m tests.loadtest.fake_server --gap-ms 50` runs it alone, for measuring the generator itself.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop
from aiohttp import web


@dataclass(kw_only=True)
class Script:
    """How the server answers one request."""

    first_s: float = 0.0  # until the first event
    gaps_s: tuple[float, ...] | None = None  # between events, the last one repeated
    texts: tuple[str, ...] | None = None  # of each event; else one word per token
    num_events: int | None = None  # else max_tokens
    send_ids: bool = False
    usage_tokens: int | None = None  # else one per event
    has_usage: bool = True
    finish_apart: bool = False  # an event of its own for the finish reason, without text
    finish_reason: str = "length"
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    break_after: int | None = None  # cut the connection after so many events
    error_after: int | None = None  # an error event after so many events


@dataclass(kw_only=True)
class Seen:
    """One request as the server saw it."""

    body: dict[str, Any]
    arrived_ns: int
    sent_ns: list[int] = field(default_factory=list)  # just before each event was written


class FakeServer:
    """Answers by script_of; waits while stalled."""

    def __init__(self, script_of: Callable[[dict[str, Any]], Script] | None = None) -> None:
        self.seen: list[Seen] = []
        self.url = ""
        self.refused_fields: set[str] = set()
        self.has_tokenize = True
        self.flowing = asyncio.Event()  # cleared: the server is stalled, and nobody gets anything
        self.flowing.set()
        self._arrival = asyncio.Event()
        self._script_of = script_of or (lambda body: Script())

    async def has_seen(self, count: int) -> None:
        """Wait until so many requests have come."""
        while len(self.seen) < count:
            self._arrival.clear()
            await self._arrival.wait()

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator["FakeServer"]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """A word of four letters or fewer is one token, a longer one is two; each text gets one more in front."""
        if not self.has_tokenize:
            raise web.HTTPNotFound
        body = await request.json()
        return web.json_response({"count": count_tokens(body["prompt"]), "max_model_len": 8192})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen = Seen(body=body, arrived_ns=time.monotonic_ns())
        self.seen.append(seen)
        self._arrival.set()
        for name in self.refused_fields & set(body):
            return web.json_response({"error": {"message": body, "param": name, "code": "unknown_field"}}, status=400)
        script = self._script_of(body)
        if script.status != 200:
            return web.json_response({"error": script.error}, status=script.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # The client went away: its right.
            await self._stream(response, request.transport, body, script, seen)
        return response

    async def _stream(
        self,
        response: web.StreamResponse,
        transport: asyncio.Transport | None,
        body: dict[str, Any],
        script: Script,
        seen: Seen,
    ) -> None:
        is_chat = "messages" in body
        num_events = script.num_events or body["max_tokens"]
        gaps_s = script.gaps_s or (0.0,)
        if is_chat:
            await response.write(_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        await response.write(b": waiting\n\n")
        for index in range(num_events):
            await asyncio.sleep(script.first_s if index == 0 else gaps_s[min(index - 1, len(gaps_s) - 1)])
            await self.flowing.wait()
            if script.break_after == index:
                assert transport is not None, "the connection is open"
                transport.abort()
                return
            if script.error_after == index:
                await response.write(_event({"error": {"message": "it broke", "code": "overloaded"}}))
                await response.write(b"data: [DONE]\n\n")
                return
            text = f" w{index}" if script.texts is None else script.texts[index]
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": text}} if is_chat else {"text": text}
            if script.send_ids:
                choice["token_ids"] = [index]
            if index == num_events - 1 and not script.finish_apart:
                choice["finish_reason"] = script.finish_reason
            data = _event({"choices": [choice]})
            seen.sent_ns.append(time.monotonic_ns())
            await response.write(data)
        if script.finish_apart:
            end: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
            await response.write(_event({"choices": [{"index": 0, **end, "finish_reason": script.finish_reason}]}))
        if script.has_usage and body.get("stream_options", {}).get("include_usage"):
            usage = {
                "prompt_tokens": _prompt_tokens(body),
                "completion_tokens": script.usage_tokens or num_events,
            }
            await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()


def count_tokens(text: str) -> int:
    return 1 + sum(1 if len(word) <= 4 else 2 for word in text.split())


def _prompt_tokens(body: dict[str, Any]) -> int:
    if "messages" in body:
        return sum(count_tokens(message["content"]) for message in body["messages"])
    return len(body["prompt"]) if isinstance(body["prompt"], list) else count_tokens(body["prompt"])


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


async def _serve(options: argparse.Namespace) -> None:
    script = Script(first_s=options.first_ms / 1e3, gaps_s=(options.gap_ms / 1e3,))
    async with FakeServer(lambda body: script).serving(options.port) as server:
        print(server.url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=20.0)
    parser.add_argument("--gap-ms", type=float, default=50.0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(parser.parse_args()))
