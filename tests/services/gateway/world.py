"""A real gateway process, and a tokenizer that the test plays over a real link."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from common.actor.mailbox import Mailbox
from common.ids import RequestId, WorkerId, new_instance_id
from common.messages import CallFailed, Cancel, Decode, Decoded, Encode, Encoded, PoolCard, Submit, TextBatch
from common.messages.cards import ModelCard
from common.messages.links import Hello, Role
from common.messages.requests import (
    Choice,
    FinishReason,
    RejectReason,
    RequestEnded,
    RequestQueued,
    RequestRejected,
    Stamps,
    TextDelta,
)
from common.wire.link import Peer, PeerDown, PeerUp, Received
from common.wire.session import Endpoint
from common.wire.zmq_link import Sockets
from common.wire.zmq_socket import LinkSettings

MODEL = "tiny"
BOUND_S = 60.0
"""No wait of a test is longer: what should come comes in milliseconds, or seconds where a process has to start."""


def pool_card(num_workers: int = 1, name: str = MODEL) -> PoolCard:
    card = ModelCard(name=name, max_model_len=2048, vocab_size=1000, eos_token_ids=(0,))
    return PoolCard(model=card, num_workers=num_workers, kv_capacity=4096, tbt_target_ms=100)


class Tokenizer:
    """Binds an inbox, says which pool it has, and leaves the rest to the test."""

    def __init__(self, address: str = "tcp://127.0.0.1:*", *, num_workers: int = 1, window: int = 1024) -> None:
        self._mailbox = Mailbox()
        hello = Hello(role=Role.TOKENIZER, instance_id=new_instance_id("tokenizer"), window=window)
        self._sockets = Sockets(LinkSettings())
        self._num_workers = num_workers
        endpoint = Endpoint(hello=hello, peer_roles=frozenset({Role.GATEWAY}), mailbox=self._mailbox)
        self.address = self._sockets.bind(address, endpoint).address
        self.peer: Peer | None = None
        self.submits: asyncio.Queue[Submit] = asyncio.Queue()
        self.cancels: asyncio.Queue[Cancel] = asyncio.Queue()
        self.questions: asyncio.Queue[Encode | Decode] = asyncio.Queue()
        self.downs: asyncio.Queue[str] = asyncio.Queue()
        self.answer: Callable[[Submit], None] | None = None  # answers Submits by itself
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        self._task = asyncio.create_task(self._run())

    def hold(self) -> None:
        """Take nothing more from the link but the one event that wakes this."""
        self._may_go_on.clear()

    def go_on(self) -> None:
        self._may_go_on.set()

    async def _run(self) -> None:
        async for event in self._mailbox:
            await self._may_go_on.wait()
            match event:
                case PeerUp(peer):
                    self.peer = peer
                    peer.send(pool_card(self._num_workers))
                case PeerDown(_, detail):
                    self.downs.put_nowait(detail)
                case Received(_, Submit() as submit):
                    if self.answer is None:
                        self.submits.put_nowait(submit)
                    else:
                        self.answer(submit)
                case Received(_, Cancel() as cancel):
                    self.cancels.put_nowait(cancel)
                case Received(_, Encode() | Decode() as question):
                    self.questions.put_nowait(question)

    def start_afresh(self) -> None:
        """Forget what an earlier test left here."""
        self.answer = None
        for queue in (self.submits, self.cancels, self.questions, self.downs):
            while not queue.empty():
                queue.get_nowait()

    def close(self) -> None:
        """Say Bye and close, once."""
        if self._task.done():
            return
        self._mailbox.close()
        self._sockets.close()
        self._task.cancel()

    def send(self, message: PoolCard | TextBatch | Encoded | Decoded | CallFailed) -> None:
        assert self.peer is not None
        self.peer.send(message)

    async def submitted(self) -> Submit:
        async with asyncio.timeout(BOUND_S):
            return await self.submits.get()

    async def cancelled(self) -> Cancel:
        async with asyncio.timeout(BOUND_S):
            return await self.cancels.get()

    async def asked(self) -> Encode | Decode:
        async with asyncio.timeout(BOUND_S):
            return await self.questions.get()

    async def lost(self) -> str:
        async with asyncio.timeout(BOUND_S):
            return await self.downs.get()

    def queue(self, submit: Submit, num_prompt_tokens: int = 5) -> None:
        """The ring takes every choice of submit."""
        self.send(TextBatch(queued=tuple(queued(choice, num_prompt_tokens) for choice in submit.choices)))

    def say(self, choice: Choice, first_index: int, text_offset: int, text: str, num_tokens: int = 1) -> None:
        self.send(TextBatch(deltas=(delta(choice.request_id, first_index, text_offset, text, num_tokens),)))

    def end(
        self,
        choice: Choice,
        num_output_tokens: int,
        reason: FinishReason = FinishReason.STOP,
        num_cached_tokens: int = 0,
        detail: str = "",
    ) -> None:
        ended = RequestEnded(
            request_id=choice.request_id,
            attempt=1,
            reason=reason,
            num_prompt_tokens=5,
            num_output_tokens=num_output_tokens,
            num_cached_tokens=num_cached_tokens,
            detail=detail,
        )
        self.send(TextBatch(ended=(ended,)))

    def reject(self, choice: Choice, reason: RejectReason, detail: str, **fields: Any) -> None:
        rejected = RequestRejected(request_id=choice.request_id, attempt=1, reason=reason, detail=detail, **fields)
        self.send(TextBatch(ended=(rejected,)))

    def say_hello_world(self, submit: Submit) -> None:
        """A complete answer for each choice: two tokens, `Hello` and ` world`."""
        self.queue(submit)
        for choice in submit.choices:
            self.say(choice, 0, 0, "Hello")
            self.say(choice, 1, 5, " world")
            self.end(choice, 2)


def queued(choice: Choice, num_prompt_tokens: int = 5) -> RequestQueued:
    return RequestQueued(request_id=choice.request_id, attempt=1, num_prompt_tokens=num_prompt_tokens)


def delta(
    request_id: RequestId, first_index: int, text_offset: int, text: str, num_tokens: int = 1, *, attempt: int = 1
) -> TextDelta:
    ids = tuple(range(first_index + 1, first_index + 1 + num_tokens))
    stamps = Stamps(worker_id=WorkerId(new_instance_id("worker")), iteration=first_index, worker_ns=1)
    return TextDelta(request_id, attempt, first_index, ids, text_offset, text, stamps)


RawConnection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class GatewayProcess:
    """`python -m services.gateway`, with its log lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self.raw_log = ""
        self.url = ""
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            self.raw_log += raw.decode()
            async with self._news:
                self.lines.append(json.loads(raw) if raw.startswith(b"{") else {"event": "", "text": raw.decode()})
                self._news.notify_all()

    async def logged(self, event: str, **fields: Any) -> dict[str, Any]:
        """The first line with this event and these fields, once it is there."""
        return (await self.logged_times(1, event, **fields))[0]

    async def logged_times(self, num_lines: int, event: str, **fields: Any) -> list[dict[str, Any]]:
        """The lines with this event and these fields, once there are so many."""

        def found() -> list[dict[str, Any]]:
            return [
                line
                for line in self.lines
                if line["event"] == event and all(line.get(key) == value for key, value in fields.items())
            ]

        async with asyncio.timeout(BOUND_S), self._news:
            await self._news.wait_for(lambda: len(found()) >= num_lines)
        return found()

    async def ended(self) -> int:
        async with asyncio.timeout(BOUND_S):
            await self._task
            return await self.process.wait()


async def started(tokenizers: Sequence[str], **options: Any) -> GatewayProcess:
    """A gateway process that may not have come far yet."""
    options = {"port": 0, "tokenizers": ",".join(tokenizers), **options}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LEGATO_")}
    command = (sys.executable, "-m", "services.gateway", *flags)
    return GatewayProcess(await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environ))


@asynccontextmanager
async def gateway(tokenizers: Sequence[str], **options: Any) -> AsyncIterator[GatewayProcess]:
    """A gateway that listens on a free port and dials these addresses."""
    process = await started(tokenizers, **options)
    try:
        process.url = (await process.logged("gateway_listening"))["url"]
        yield process
    finally:
        if process.process.returncode is None:
            process.process.send_signal(signal.SIGTERM)
            try:
                await process.ended()
            except TimeoutError:
                process.process.kill()
                raise


class World:
    """One gateway, one tokenizer, one HTTP client."""

    def __init__(self, process: GatewayProcess, tokenizers: list[Tokenizer], http: aiohttp.ClientSession) -> None:
        self.gateway = process
        self._tokenizers = tokenizers
        self._connections: list[asyncio.StreamWriter] = []
        self.http = http
        self.url = process.url

    @property
    def tokenizer(self) -> Tokenizer:
        """The one that lives."""
        return self._tokenizers[-1]

    async def connect(self, *, receive_buffer_bytes: int | None = None) -> RawConnection:
        """A bare connection to the public port; start_afresh closes it if the test does not."""
        connection = socket.socket()
        if receive_buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        # What a slow reader does not read must stay at the server.
        limit = 1 << 16 if receive_buffer_bytes is None else 1 << 10
        reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
        self._connections.append(writer)
        return reader, writer

    async def start_afresh(self) -> None:
        """Forget what an earlier test left here."""
        self.tokenizer.start_afresh()
        for writer in self._connections:
            writer.close()
        self._connections.clear()
        await asyncio.sleep(0)  # The loop's turn to close them.

    async def restart_tokenizer(self) -> None:
        """Lose the tokenizer, and bring up another at its address."""
        self.tokenizer.close()
        await self.gateway.logged("tokenizer_lost")
        self._tokenizers.append(Tokenizer(self.tokenizer.address))

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    async def ready(self) -> None:
        """Wait until the gateway is ready: each answer is an event, and the tokenizer's connection brings the last."""
        async with asyncio.timeout(BOUND_S):
            while True:
                async with self.http.get(f"{self.url}/health/ready") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.02)

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        """Post a body (bytes as they are, else as JSON); return status and answer."""
        if isinstance(body, bytes):
            kwargs = {"data": body, "headers": {"Content-Type": "application/json"}, **kwargs}
        else:
            kwargs = {"json": body, **kwargs}
        async with asyncio.timeout(BOUND_S), self.http.post(f"{self.url}{path}", **kwargs) as response:
            return response.status, await response.json()

    async def complete(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "Say hello", **fields})

    async def works(self) -> None:
        """A plain request is answered: whatever came before did no harm."""
        self.tokenizer.answer = self.tokenizer.say_hello_world
        status, answer = await self.complete()
        self.tokenizer.answer = None
        assert (status, answer["choices"][0]["text"]) == (200, "Hello world"), answer

    async def events(self, response: aiohttp.ClientResponse) -> list[Any]:
        """All data events of a stream, parsed, [DONE] as a string."""
        async with asyncio.timeout(BOUND_S):
            return parsed_events((await response.read()).decode())


def parsed_events(text: str) -> list[Any]:
    assert text.endswith("\n\n") or not text, text
    blocks = [block for block in text.split("\n\n") if block.startswith("data: ")]
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


@asynccontextmanager
async def world(*, num_workers: int = 1, window: int = 1024, **options: Any) -> AsyncIterator[World]:
    """A gateway with these options and one tokenizer, connected."""
    tokenizers = [Tokenizer(num_workers=num_workers, window=window)]
    try:
        async with gateway([tokenizers[0].address], **options) as process, aiohttp.ClientSession() as http:
            here = World(process, tokenizers, http)
            if num_workers:
                await here.ready()
            else:
                await process.logged("pool_changed")
            try:
                yield here
            finally:
                await here.start_afresh()
    finally:
        for each in tokenizers:
            each.close()
