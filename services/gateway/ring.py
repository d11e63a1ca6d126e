"""The gateway's side of its links: which tokenizers there are, and what goes to and comes from each."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from common.actor.mailbox import Mailbox
from common.clock import monotonic_ns
from common.ids import RequestId
from common.injection import NO_DELAYS, Delays
from common.messages import CallFailed, Cancel, Decode, Decoded, Encode, Encoded, PoolCard, TextBatch
from common.messages.links import Hello, Role
from common.wire.link import LinkFull, Peer, PeerDown, PeerGone, PeerUp, Received
from common.wire.names import name_in
from common.wire.session import Endpoint
from common.wire.zmq_link import Dial, Sockets
from services.gateway.calls import Call
from services.gateway.core import CallChanged, CancelRequests, CutClient, DropPeer, Effect, StreamCore
from services.gateway.errors import ApiError, rejection, unavailable, unknown_model
from services.gateway.resolver import resolve

log = structlog.get_logger()

MAX_CANCEL_RESERVE = 64
"""Messages of a link's window that only a Cancel may use, so that a full link can still be relieved."""
CANCEL_RETRY_S = 0.1
"""Pause before a Cancel that found no room is sent again; all that wait for one peer travel as one message."""


class Neighbour:
    """One tokenizer address: its connection, and what is open on it."""

    def __init__(self, address: str, configured: str) -> None:
        self.address = address
        self.configured = configured  # the operator's word for it: a name stands for several addresses
        self.mailbox = Mailbox()
        self.dial: Dial | None = None
        self.peer: Peer | None = None
        self.cards: dict[str, PoolCard] = {}  # by model name
        self.calls: dict[str, asyncio.Future[Encoded | Decoded]] = {}  # /tokenize and /detokenize, by call id
        self.uncancelled: list[RequestId] = []  # wait for room on the link; bounded by max_open_requests
        self.retry: asyncio.TimerHandle | None = None
        self.is_retiring = False  # its name no longer resolves to it: no new requests

    def has_room(self, num_messages: int) -> bool:
        """Whether so many messages may be sent, with the reserve for Cancel left alone."""
        if self.peer is None:
            return False
        reserve = max(1, min(MAX_CANCEL_RESERVE, self.peer.hello.window // 8))
        return self.peer.num_free >= num_messages + reserve


class Ring:
    """Dials the tokenizers, gives calls to them, and feeds the core with what they say."""

    def __init__(
        self,
        sockets: Sockets,
        hello: Hello,
        core: StreamCore,
        *,
        addresses: tuple[str, ...],
        resolve_interval_s: float,
        retry_after_s: float,
        on_changed: Callable[[Call], None],
        on_cut: Callable[[Call], None],
        on_cards: Callable[[], None],
        delays: Delays = NO_DELAYS,
        look_up: Callable[[Iterable[str]], Awaitable[dict[str, frozenset[str]]]] = resolve,
    ) -> None:
        """on_changed wakes a call's handler; on_cut closes its connection; on_cards hears of pools that come and go."""
        self._sockets = sockets
        self._hello = hello
        self._core = core
        self._addresses = addresses
        self._resolve_interval_s = resolve_interval_s
        self._retry_after_s = retry_after_s
        self._on_changed = on_changed
        self._on_cut = on_cut
        self._on_cards = on_cards
        self._delays = delays
        self._look_up = look_up
        self._neighbours: dict[str, Neighbour] = {}

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Keep a connection to every tokenizer until cancelled."""
        while True:
            self._meet(await self._look_up(self._addresses), tasks)
            if all(name_in(address) is None for address in self._addresses):
                return  # Nothing can change, so nothing needs a timer.
            await asyncio.sleep(self._resolve_interval_s)

    def hang_up(self) -> None:
        """End all connections; the tasks that serve them end with them."""
        for neighbour in list(self._neighbours.values()):
            self._leave(neighbour, "the gateway stopped")

    def cards(self) -> dict[str, PoolCard]:
        """The pools that can be reached now, by model name; with workers where any has."""
        cards: dict[str, PoolCard] = {}
        for neighbour in self._neighbours.values():
            for name, card in neighbour.cards.items():
                if name not in cards or cards[name].num_workers == 0:
                    cards[name] = card
        return cards

    def card(self, model: str | None) -> PoolCard:
        """The pool that serves model; for None, the only one there is.

        Raises:
            ApiError: 404 if nobody knows the model, 503 if there is nobody to ask.
        """
        cards = self.cards()
        if not cards:
            raise unavailable("no tokenizer with a model is connected", self._retry_after_s)
        if model is None:
            if len(cards) > 1:
                raise ApiError(400, f"model is required: {len(cards)} are served here", param="model")
            return next(iter(cards.values()))
        if model not in cards:
            raise unknown_model(model)
        return cards[model]

    def submit(self, call: Call) -> None:
        """Give the call to the tokenizer with the fewest open requests.

        Raises:
            ApiError: 503 if none has workers, or every link is full.
        """
        model = call.submits[0].model
        neighbour = self._choose(model, len(call.submits), needs_workers=True)
        assert neighbour.peer is not None
        self._core.open(call, neighbour.peer)
        try:
            for submit in call.submits:
                neighbour.peer.send(submit)
        except (LinkFull, PeerGone) as error:
            self.close(call)
            raise unavailable(f"the link to the tokenizer failed: {error}", self._retry_after_s) from error

    def close(self, call: Call) -> None:
        """The call's handler is done with it."""
        self._carry_out(self._core.close(call))

    def fail(self, call: Call, error: ApiError) -> None:
        self._carry_out(self._core.fail(call, error))

    async def ask(self, question: Encode | Decode, timeout_s: float) -> Encoded | Decoded:
        """Return the tokenizer's answer.

        Raises:
            ApiError: What the tokenizer refused it with; 503 if it does not answer in time or cannot be reached.
        """
        neighbour = self._choose(question.model, 1, needs_workers=False)
        assert neighbour.peer is not None
        answer: asyncio.Future[Encoded | Decoded] = asyncio.get_running_loop().create_future()
        neighbour.calls[question.call_id] = answer
        try:
            neighbour.peer.send(question)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise unavailable(f"no answer within {timeout_s:g} s", self._retry_after_s) from None
        except (LinkFull, PeerGone) as error:
            raise unavailable(f"the link to the tokenizer failed: {error}", self._retry_after_s) from error
        finally:
            neighbour.calls.pop(question.call_id, None)

    def _choose(self, model: str, num_messages: int, *, needs_workers: bool) -> Neighbour:
        able = [
            neighbour
            for neighbour in self._neighbours.values()
            if (card := neighbour.cards.get(model)) is not None
            and not neighbour.is_retiring
            and (card.num_workers > 0 or not needs_workers)
        ]
        if not able:
            raise unavailable(f"no worker serves {model} now", self._retry_after_s)
        with_room = [neighbour for neighbour in able if neighbour.has_room(num_messages)]
        if not with_room:
            raise unavailable(f"the links to {len(able)} tokenizers are full", self._retry_after_s, code="link_full")
        return min(with_room, key=lambda neighbour: self._core.num_open_at(neighbour.peer) + len(neighbour.calls))

    def _meet(self, found: dict[str, frozenset[str]], tasks: asyncio.TaskGroup) -> None:
        """Dial what is new. What has vanished finishes what it has, and is then left."""
        for configured, addresses in found.items():
            for address in addresses - self._neighbours.keys():
                neighbour = Neighbour(address, configured)
                self._dial(neighbour)
                self._neighbours[address] = neighbour
                tasks.create_task(self._serve(neighbour), name=f"tokenizer {address}")
        for neighbour in list(self._neighbours.values()):
            if neighbour.configured in found:
                neighbour.is_retiring = neighbour.address not in found[neighbour.configured]
                self._leave_if_retired(neighbour)

    def _dial(self, neighbour: Neighbour) -> None:
        endpoint = Endpoint(hello=self._hello, peer_roles=frozenset({Role.TOKENIZER}), mailbox=neighbour.mailbox)
        neighbour.dial = self._sockets.dial(neighbour.address, endpoint)

    async def _serve(self, neighbour: Neighbour) -> None:
        """Take in what one tokenizer says, until it is left."""
        async for event in neighbour.mailbox:
            match event:
                case PeerUp(peer):
                    neighbour.peer = peer
                    log.info("tokenizer_connected", address=neighbour.address, tokenizer=peer.hello.instance_id)
                case PeerDown(peer, detail):
                    self._lose(neighbour, peer, detail)
                case Received(peer, message):
                    self._receive(neighbour, peer, message)
            self._send_cancels(neighbour)
            self._leave_if_retired(neighbour)

    def _receive(self, neighbour: Neighbour, peer: Peer, message: object) -> None:
        match message:
            case TextBatch():
                if self._delays:
                    self._delays.block("write")
                self._carry_out(self._core.apply(peer, message, monotonic_ns()))
            case PoolCard():
                neighbour.cards[message.model.name] = message
                log.info(
                    "pool_changed",
                    address=neighbour.address,
                    model=message.model.name,
                    num_workers=message.num_workers,
                )
                self._on_cards()
            case Encoded() | Decoded() | CallFailed():
                answer = neighbour.calls.get(message.call_id)
                if answer is None or answer.done():
                    return  # Its asker has given up.
                if isinstance(message, CallFailed):
                    answer.set_exception(rejection(message, self._retry_after_s))
                else:
                    answer.set_result(message)
            case _:
                self._drop(neighbour, f"a tokenizer does not send {type(message).__name__}")

    def _lose(self, neighbour: Neighbour, peer: Peer, detail: str) -> None:
        """The connection has ended: so has all that was open on it."""
        if neighbour.peer is not peer:
            return  # Dropped by us before, and seen to then.
        neighbour.peer = None
        neighbour.cards.clear()
        neighbour.uncancelled.clear()
        num_open = self._core.num_open_at(peer)
        report = log.info if neighbour.address not in self._neighbours else log.warning
        report("tokenizer_lost", address=neighbour.address, detail=detail, num_open=num_open)
        for answer in neighbour.calls.values():
            if not answer.done():
                answer.set_exception(unavailable("the tokenizer was lost", self._retry_after_s))
        self._carry_out(self._core.lose(peer, detail))
        self._on_cards()

    def _drop(self, neighbour: Neighbour, detail: str) -> None:
        """End the connection and start a new one: the peer has lost something, or speaks out of turn."""
        assert neighbour.peer is not None
        assert neighbour.dial is not None
        # A new dial, because one whose peer was dropped from this side does not dial again by itself.
        self._sockets.hang_up(neighbour.dial, detail)
        self._lose(neighbour, neighbour.peer, detail)
        self._dial(neighbour)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case CallChanged(call):
                    self._on_changed(call)
                case CancelRequests(peer, request_ids):
                    neighbour = self._neighbour_at(peer)
                    if neighbour is not None:
                        neighbour.uncancelled += request_ids
                        self._send_cancels(neighbour)
                case DropPeer(peer, detail):
                    neighbour = self._neighbour_at(peer)
                    if neighbour is not None:
                        self._drop(neighbour, detail)
                case CutClient(call):
                    self._on_cut(call)

    def _neighbour_at(self, peer: object) -> Neighbour | None:
        """The neighbour whose connection this is, if it still is. There are as many as tokenizers: few."""
        return next((each for each in self._neighbours.values() if each.peer is peer), None)

    def _send_cancels(self, neighbour: Neighbour) -> None:
        """Cancel what nobody waits for. On a full link it is tried again, as one message for all of it."""
        if neighbour.peer is None or not neighbour.uncancelled:
            return
        try:
            neighbour.peer.send(Cancel(request_ids=tuple(neighbour.uncancelled)))
            neighbour.uncancelled.clear()
        except LinkFull:
            if neighbour.retry is None:
                neighbour.retry = asyncio.get_running_loop().call_later(CANCEL_RETRY_S, self._retry, neighbour)
        except PeerGone:
            neighbour.uncancelled.clear()  # What ran there ends with it.

    def _retry(self, neighbour: Neighbour) -> None:
        neighbour.retry = None
        self._send_cancels(neighbour)
        self._leave_if_retired(neighbour)

    def _leave_if_retired(self, neighbour: Neighbour) -> None:
        if not neighbour.is_retiring or neighbour.address not in self._neighbours:
            return
        if neighbour.peer is None or not (self._core.num_open_at(neighbour.peer) or neighbour.calls):
            self._leave(neighbour, "its address has vanished")

    def _leave(self, neighbour: Neighbour, detail: str) -> None:
        del self._neighbours[neighbour.address]
        if neighbour.retry is not None:
            neighbour.retry.cancel()
        assert neighbour.dial is not None
        self._sockets.hang_up(neighbour.dial, detail)
        if neighbour.peer is not None:
            self._lose(neighbour, neighbour.peer, detail)
        neighbour.mailbox.close()
