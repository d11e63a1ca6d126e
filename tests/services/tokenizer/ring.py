"""The real process between a gateway and a scheduler that the test plays, over real sockets."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import aiohttp

from common.actor.mailbox import Mailbox
from common.ids import new_instance_id
from common.messages import ActorMessage, PoolCard, TextBatch
from common.messages.links import Hello, Role
from common.messages.requests import RequestEnded, RequestRejected
from common.wire.link import Peer, PeerDown, PeerUp, Received
from common.wire.session import DEFAULT_WINDOW, Endpoint
from common.wire.zmq_link import Sockets
from common.wire.zmq_socket import LinkSettings
from tests.ports import free_address
from tests.services.tokenizer.world import pool_card

T = TypeVar("T")
MAX_WAIT_S = 60.0


def endpoint(role: Role, peer: Role, mailbox: Mailbox, window: int = DEFAULT_WINDOW) -> Endpoint:
    hello = Hello(role=role, instance_id=new_instance_id(role), window=window)
    return Endpoint(hello=hello, peer_roles=frozenset({peer}), mailbox=mailbox)


class TokenizerProcess:
    """`python -m services.tokenizer`, and what it logged."""

    def __init__(self, process: "subprocess.Popen[str]", scheduler_address: str) -> None:
        self.process = process
        self.scheduler_address = scheduler_address
        self.log: list[dict[str, Any]] = []
        self._bound = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._bound.wait(MAX_WAIT_S), self.log

    def field(self, event: str, name: str) -> str:
        (value,) = (line[name] for line in self.log if line["event"] == event)
        return str(value)

    @property
    def address(self) -> str:
        return self.field("inbox_bound", "address")

    @property
    def admin_url(self) -> str:
        return self.field("process_started", "admin")

    def stop(self) -> int:
        self.process.terminate()
        status = self.process.wait(MAX_WAIT_S)
        self._reader.join(MAX_WAIT_S)
        return status

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.log.append(json.loads(line) if line.startswith("{") else {"event": line})
                if self.log[-1]["event"] == "inbox_bound":
                    self._bound.set()
        self._bound.set()


@contextmanager
def running_tokenizer(*flags: str) -> Iterator[TokenizerProcess]:
    scheduler_address = free_address()
    command = [sys.executable, "-m", "services.tokenizer", "--bind", "tcp://127.0.0.1:*"]
    process = subprocess.Popen(
        [*command, "--scheduler", scheduler_address, *flags], stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield TokenizerProcess(process, scheduler_address)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(MAX_WAIT_S)


class Neighbour:
    """A gateway or scheduler: its link to the tokenizer, and what came on it."""

    def __init__(self, role: Role, window: int) -> None:
        self.mailbox = Mailbox()
        self.endpoint = endpoint(role, Role.TOKENIZER, self.mailbox, window)
        self.sockets = Sockets(LinkSettings())
        self.tokenizer: Peer | None = None
        self.batches: list[TextBatch] = []

    def send(self, *messages: ActorMessage) -> None:
        assert self.tokenizer is not None
        for message in messages:
            self.tokenizer.send(message)

    async def take(self, kind: type[T]) -> T:
        """The next message of this kind; others before it would be a surprise, but for cards."""
        while True:
            event = await anext(self.mailbox)
            assert isinstance(event, Received), event
            if isinstance(event.message, kind):
                return event.message
            assert isinstance(event.message, PoolCard), event.message

    async def lost(self) -> str:
        """Why the link ended, once it has; what came before is passed over."""
        while not isinstance(event := await anext(self.mailbox), PeerDown):
            pass
        return event.detail

    async def end_of(self, request_id: str) -> RequestEnded | RequestRejected:
        """Take batches until this request has ended."""
        while True:
            batch = await self.take(TextBatch)
            self.batches.append(batch)
            for end in batch.ended:
                if end.request_id == request_id:
                    return end

    def text(self, request_id: str) -> str:
        """All text of a request that has been taken."""
        return "".join(d.text for batch in self.batches for d in batch.deltas if d.request_id == request_id)

    def close(self) -> None:
        self.sockets.close()

    async def _up(self) -> None:
        event = await anext(self.mailbox)
        assert isinstance(event, PeerUp), event
        self.tokenizer = event.peer


@asynccontextmanager
async def scheduler_of(process: TokenizerProcess, window: int = DEFAULT_WINDOW) -> AsyncIterator[Neighbour]:
    scheduler = Neighbour(Role.SCHEDULER, window)
    try:
        scheduler.sockets.bind(process.scheduler_address, scheduler.endpoint)
        await scheduler._up()
        yield scheduler
    finally:
        scheduler.close()


@asynccontextmanager
async def gateway_of(process: TokenizerProcess, window: int = DEFAULT_WINDOW) -> AsyncIterator[Neighbour]:
    gateway = Neighbour(Role.GATEWAY, window)
    try:
        gateway.sockets.dial(process.address, gateway.endpoint)
        await gateway._up()
        yield gateway
    finally:
        gateway.close()


@asynccontextmanager
async def ring(process: TokenizerProcess, **card: Any) -> AsyncIterator[tuple[Neighbour, Neighbour]]:
    """A gateway and a scheduler, the scheduler's card having reached the gateway."""
    async with scheduler_of(process) as scheduler, gateway_of(process) as gateway:
        sent = pool_card(**card)
        scheduler.send(sent)
        while (await gateway.take(PoolCard)) != sent:
            pass  # An earlier test's scheduler, now lost.
        yield gateway, scheduler


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine for MAX_WAIT_S at most."""

    async def bounded() -> None:
        async with asyncio.timeout(MAX_WAIT_S):
            await test()

    asyncio.run(bounded())


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()
