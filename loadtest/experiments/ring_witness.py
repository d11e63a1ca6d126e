"""A second gateway that looks on: one stream of its own in every iteration, whose stamps say when each hop had it.

The real gateway's streams get their tokens from the same iterations, so with the witness's stamps each token that a
client reads can be followed back through the ring. All clocks are this machine's one monotonic clock, which is what
makes lags between hops, and not only differences of gaps, mean something here.
"""

import asyncio
import contextlib
import itertools
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.actor.mailbox import Mailbox
from common.clock import monotonic_ns
from common.ids import RequestId, new_instance_id, pack_ids
from common.messages import Cancel, PoolCard, TextBatch
from common.messages.links import Hello, Role
from common.messages.requests import Choice, IdsPrompt, Sampling, Submit
from common.wire.link import Peer, PeerDown, PeerUp, Received
from common.wire.session import DEFAULT_WINDOW, Endpoint
from common.wire.zmq_link import Sockets
from common.wire.zmq_socket import LinkSettings

KNOCK_INTERVAL_S = 0.25
"""Between two short requests that measure the way down."""
PROMPT_LEN = 16
READY_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Sightings:
    """What the witness saw, one entry an iteration; times in nanoseconds of the machine's monotonic clock."""

    worker_ns: "array[int]" = field(default_factory=lambda: array("q"))
    scheduler_ns: "array[int]" = field(default_factory=lambda: array("q"))
    tokenizer_ns: "array[int]" = field(default_factory=lambda: array("q"))
    gateway_ns: "array[int]" = field(default_factory=lambda: array("q"))  # here
    queued_ns: list[int] = field(default_factory=list)  # from a knock's Submit to the word that it is queued


class RingWitness:
    """Speaks to one tokenizer as a gateway does."""

    def __init__(self, peer: Peer, model: str, stream_len: int) -> None:
        self.seen = Sightings()
        self._peer = peer
        self._model = model
        self._stream_len = stream_len
        self._numbers = itertools.count()
        self._instance_id = new_instance_id("witness")
        self._stream = RequestId("")
        self._knocks: dict[RequestId, int] = {}

    def begin_stream(self) -> None:
        """Have a token of every iteration from now on."""
        self._stream = self._submit(self._stream_len)

    async def knock(self) -> None:
        """Send short requests until cancelled."""
        while True:
            request_id = self._submit(1)
            self._knocks[request_id] = monotonic_ns()
            await asyncio.sleep(KNOCK_INTERVAL_S)

    def leave(self) -> None:
        """End the stream."""
        self._peer.send(Cancel(request_ids=(self._stream,)))

    def take(self, batch: TextBatch) -> None:
        """Look at what came."""
        now_ns = monotonic_ns()
        for queued in batch.queued:
            if (began_ns := self._knocks.pop(queued.request_id, None)) is not None:
                self.seen.queued_ns.append(now_ns - began_ns)
        for delta in batch.deltas:
            if delta.request_id == self._stream:
                seen, stamps = self.seen, delta.stamps
                seen.worker_ns.append(stamps.worker_ns)
                seen.scheduler_ns.append(stamps.scheduler_ns)
                seen.tokenizer_ns.append(stamps.tokenizer_ns)
                seen.gateway_ns.append(now_ns)
        if any(ended.request_id == self._stream for ended in batch.ended):
            self.begin_stream()

    def _submit(self, num_tokens: int) -> RequestId:
        number = next(self._numbers)
        request_id = RequestId(f"{self._instance_id}-{number}")
        # Prompts that differ from the first token on, so that no prefix is found in a cache.
        prompt = [100 + (number * PROMPT_LEN + i) % 10_000 for i in range(PROMPT_LEN)]
        self._peer.send(
            Submit(
                attempt=1,
                model=self._model,
                prompt=IdsPrompt(pack_ids(prompt)),
                choices=(Choice(request_id, seed=number),),
                sampling=Sampling(ignore_eos=True),
                max_tokens=num_tokens,
            )
        )
        return request_id


@asynccontextmanager
async def witness_at(address: str, stream_len: int) -> AsyncIterator[RingWitness]:
    """Connect to the tokenizer at address; the block runs with its stream going.

    Args:
        address: The tokenizer's inbox.
        stream_len: Tokens of one stream; when they are through, the next begins.

    Raises:
        TimeoutError: If the tokenizer does not say within READY_TIMEOUT_S which model it serves.
        ConnectionError: If the tokenizer hangs up.
    """
    mailbox = Mailbox()
    hello = Hello(role=Role.GATEWAY, instance_id=new_instance_id("witness"), window=DEFAULT_WINDOW)
    sockets = Sockets(LinkSettings())
    sockets.dial(address, Endpoint(hello=hello, peer_roles=frozenset({Role.TOKENIZER}), mailbox=mailbox))
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            witness = await _first_card(mailbox, stream_len)
        witness.begin_stream()
        tasks = [
            asyncio.create_task(_serve(mailbox, witness), name="witness"),
            asyncio.create_task(witness.knock(), name="knock"),
        ]
        try:
            yield witness
        finally:
            witness.leave()
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)
    finally:
        mailbox.close()
        sockets.close()


async def _first_card(mailbox: Mailbox, stream_len: int) -> RingWitness:
    peer: Peer | None = None
    async for event in mailbox:
        match event:
            case PeerUp():
                peer = event.peer
            case Received(message=PoolCard() as card) if peer is not None and card.num_workers:
                return RingWitness(peer, card.model.name, stream_len)
    raise ConnectionError("the link closed")


async def _serve(mailbox: Mailbox, witness: RingWitness) -> None:
    async for event in mailbox:
        match event:
            case Received(message=TextBatch() as batch):
                witness.take(batch)
            case PeerDown():
                raise ConnectionError(event.detail)
