"""One suite for both kinds of link: what an actor sees must not depend on what carries it."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from common.actor.mailbox import Mailbox
from common.ids import RequestId, new_instance_id
from common.messages import Cancel
from common.messages.links import Hello, Role
from common.wire.codec import encode
from common.wire.link import LinkFull, Peer, PeerDown, PeerGone, PeerUp, Received
from common.wire.memory_link import MemoryWire
from common.wire.names import leaves_loopback, name_in
from common.wire.session import Endpoint, Session
from common.wire.zmq_link import Sockets
from common.wire.zmq_socket import LinkSettings, new_keys
from tests.ports import free_address

T = TypeVar("T")
WINDOW = 8


@dataclass
class Pair:
    """A gateway that dialled a tokenizer."""

    gateway: Mailbox
    tokenizer: Mailbox
    cut: Callable[[], None]  # lose the connection


@asynccontextmanager
async def memory_pair(gateway: Endpoint, tokenizer: Endpoint) -> AsyncIterator[Pair]:
    wire = MemoryWire(gateway, tokenizer)
    yield Pair(gateway.mailbox, tokenizer.mailbox, wire.cut)


@asynccontextmanager
async def zmq_pair(gateway: Endpoint, tokenizer: Endpoint) -> AsyncIterator[Pair]:
    async with keyed_pair(gateway, tokenizer, LinkSettings()) as pair:
        yield pair


@asynccontextmanager
async def curve_pair(gateway: Endpoint, tokenizer: Endpoint) -> AsyncIterator[Pair]:
    async with keyed_pair(gateway, tokenizer, LinkSettings(keys=new_keys())) as pair:
        yield pair


@asynccontextmanager
async def keyed_pair(gateway: Endpoint, tokenizer: Endpoint, settings: LinkSettings) -> AsyncIterator[Pair]:
    below, above = Sockets(settings), Sockets(settings)
    inbox = below.bind("tcp://127.0.0.1:*", tokenizer)
    async with Cable.to(inbox.address) as cable:
        above.dial(cable.address, gateway)
        try:
            yield Pair(gateway.mailbox, tokenizer.mailbox, cut=cable.cut)
        finally:
            above.close()
            below.close()


class Cable:
    """A TCP connection's way between two machines, which a test may cut or freeze."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._writers: list[asyncio.StreamWriter] = []
        self._is_frozen = False
        self._is_cut = False
        self.address = ""

    @classmethod
    @asynccontextmanager
    async def to(cls, address: str) -> AsyncIterator["Cable"]:
        cable = cls(int(address.rsplit(":", 1)[1]))
        server = await asyncio.start_server(cable._accept, "127.0.0.1", 0)
        cable.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield cable
        finally:
            server.close()
            cable.cut()
            await asyncio.sleep(0)

    def cut(self) -> None:
        """Close every connection; refuse new ones."""
        self._is_cut = True
        for writer in self._writers:
            writer.close()

    def freeze(self) -> None:
        """Keep the connections open and carry nothing."""
        self._is_frozen = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers += [writer, there_writer]
        await asyncio.gather(self._carry(reader, there_writer), self._carry(there_reader, writer))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                if not self._is_frozen:
                    sink.write(data)
        sink.close()


PAIRS = pytest.mark.parametrize("pair_of", [memory_pair, zmq_pair, curve_pair])


def endpoint(role: Role, peer: Role, **hello: Any) -> Endpoint:
    return Endpoint(
        hello=Hello(**{"role": role, "instance_id": new_instance_id(role), "window": WINDOW, **hello}),
        peer_roles=frozenset({peer}),
        mailbox=Mailbox(),
    )


def gateway_endpoint(**hello: Any) -> Endpoint:
    return endpoint(Role.GATEWAY, Role.TOKENIZER, **hello)


def tokenizer_endpoint(**hello: Any) -> Endpoint:
    return endpoint(Role.TOKENIZER, Role.GATEWAY, **hello)


def message(n: int) -> Cancel:
    return Cancel(request_ids=(RequestId(str(n)),))


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


async def take(mailbox: Mailbox, kind: type[T]) -> T:
    event = await anext(mailbox)
    assert isinstance(event, kind), event
    return event


async def both_up(pair: Pair) -> tuple[Peer, Peer]:
    """The tokenizer as the gateway sees it, and the gateway as the tokenizer sees it."""
    return (await take(pair.gateway, PeerUp)).peer, (await take(pair.tokenizer, PeerUp)).peer


@PAIRS
def test_both_sides_learn_who_is_there_and_messages_go_both_ways_in_order(pair_of: Any) -> None:
    async def test() -> None:
        async with pair_of(gateway_endpoint(), tokenizer_endpoint()) as pair:
            tokenizer, gateway = await both_up(pair)
            assert (tokenizer.hello.role, gateway.hello.role) == (Role.TOKENIZER, Role.GATEWAY)
            for n in range(WINDOW):
                tokenizer.send(message(n))
            gateway.send(message(99))
            assert [(await take(pair.tokenizer, Received)).message for _ in range(WINDOW)] == [
                message(n) for n in range(WINDOW)
            ]
            assert (await take(pair.gateway, Received)).message == message(99)

    run(test)


@PAIRS
def test_a_full_link_is_an_event_and_credit_comes_back_when_messages_are_taken(pair_of: Any) -> None:
    async def test() -> None:
        async with pair_of(gateway_endpoint(), tokenizer_endpoint()) as pair:
            tokenizer, _ = await both_up(pair)
            for n in range(WINDOW):
                tokenizer.send(message(n))
            with pytest.raises(LinkFull, match="holds 8 messages"):
                tokenizer.send(message(WINDOW))
            for _ in range(WINDOW):
                await take(pair.tokenizer, Received)
            while tokenizer.num_free < WINDOW:  # noqa: ASYNC110  # A peer has no event for it: senders ask.
                await asyncio.sleep(0)
            tokenizer.send(message(WINDOW))
            assert (await take(pair.tokenizer, Received)).message == message(WINDOW)

    run(test)


@PAIRS
def test_a_burst_may_be_as_large_as_the_peers_window_however_small_the_own(pair_of: Any) -> None:
    num_messages = 20_000

    async def test() -> None:
        async with pair_of(gateway_endpoint(), tokenizer_endpoint(window=num_messages)) as pair:
            tokenizer, _ = await both_up(pair)
            for n in range(num_messages):
                tokenizer.send(message(n))
            for n in range(num_messages):
                assert (await take(pair.tokenizer, Received)).message == message(n)

    run(test)


@PAIRS
def test_a_lost_connection_is_seen_by_both_and_nothing_more_is_sent(pair_of: Any) -> None:
    async def test() -> None:
        async with pair_of(gateway_endpoint(), tokenizer_endpoint()) as pair:
            _, gateway = await both_up(pair)
            pair.cut()
            down = await take(pair.tokenizer, PeerDown)
            assert down.peer is gateway
            with pytest.raises(PeerGone):
                gateway.send(message(1))

    run(test)


@PAIRS
def test_a_dropped_peer_is_told_why(pair_of: Any) -> None:
    async def test() -> None:
        async with pair_of(gateway_endpoint(), tokenizer_endpoint()) as pair:
            tokenizer, gateway = await both_up(pair)
            gateway.drop("its index 7 is missing")
            assert (await take(pair.tokenizer, PeerDown)).peer is gateway
            down = await take(pair.gateway, PeerDown)
            assert (down.peer, down.detail) == (tokenizer, "its index 7 is missing")

    run(test)


@PAIRS
@pytest.mark.parametrize(
    ("gateway", "problem"),
    [
        (gateway_endpoint(protocol_major=99), "protocol 99 is not 1"),
        (gateway_endpoint(window=65_537), "a window of 65537 messages is not between 1 and 65536"),
        (endpoint(Role.WORKER, Role.TOKENIZER), "not to a worker"),
    ],
)
def test_a_peer_of_another_major_version_or_role_is_refused(pair_of: Any, gateway: Endpoint, problem: str) -> None:
    async def test() -> None:
        quiet = tokenizer_endpoint()
        async with pair_of(gateway, quiet) as pair:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await anext(pair.gateway)
            assert len(pair.tokenizer) == 0

    run(test)


def test_a_dial_before_the_bind_and_a_restarted_peer_are_both_harmless() -> None:
    async def test() -> None:
        above, address = Sockets(LinkSettings()), free_address()
        gateway = gateway_endpoint()
        above.dial(address, gateway)
        await asyncio.sleep(0.3)
        seen = []
        for _ in range(2):
            below = Sockets(LinkSettings())
            below.bind(address, tokenizer_endpoint())
            up = await take(gateway.mailbox, PeerUp)
            seen.append(up.peer.hello.instance_id)
            below.close()
            assert (await take(gateway.mailbox, PeerDown)).peer is up.peer
        above.close()
        assert seen[0] != seen[1], "a restarted process has a new instance id"

    run(test)


def test_a_name_is_looked_up_for_every_dial_since_a_replaced_container_has_another_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.wire.zmq_link.HELLO_TIMEOUT_S", 0.5)

    async def test() -> None:
        settings = LinkSettings(keys=new_keys())
        stale = socket.create_server(("127.0.0.1", 0))  # Takes connections, and never says HELLO.
        answers: list[str | OSError] = [OSError("no such name"), f"tcp://127.0.0.1:{stale.getsockname()[1]}"]
        asked = []

        async def look_up(host: str, port: int) -> str:
            asked.append((host, port))
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(answer, OSError):
                raise answer
            return answer

        above = Sockets(settings, look_up)
        gateway = gateway_endpoint()
        above.dial("tcp://tokenizer:5600", gateway)
        seen = []
        for _ in range(2):
            below = Sockets(settings)
            answers.append(below.bind("tcp://127.0.0.1:*", tokenizer_endpoint()).address)
            seen.append((await take(gateway.mailbox, PeerUp)).peer.hello.instance_id)
            below.close()
            await take(gateway.mailbox, PeerDown)
        above.close()
        stale.close()
        assert seen[0] != seen[1]
        assert len(asked) >= 4
        assert set(asked) == {("tokenizer", 5600)}

    run(test)


def test_a_look_up_that_takes_its_time_holds_up_no_other_link() -> None:
    async def test() -> None:
        settings = LinkSettings(heartbeat_interval_ms=250, heartbeat_timeout_ms=1500, keys=new_keys())
        has_asked, never = asyncio.Event(), asyncio.Event()

        async def look_up(host: str, port: int) -> str:
            has_asked.set()
            await never.wait()
            raise AssertionError

        below, above = Sockets(settings), Sockets(settings, look_up)
        gateway, tokenizer = gateway_endpoint(), tokenizer_endpoint()
        above.dial("tcp://elsewhere:5600", gateway_endpoint())
        above.dial(below.bind("tcp://127.0.0.1:*", tokenizer).address, gateway)
        await has_asked.wait()
        peer, _ = await both_up(Pair(gateway.mailbox, tokenizer.mailbox, above.close))
        await asyncio.sleep(2)  # More than a heartbeat may be late.
        peer.send(message(1))
        assert (await take(tokenizer.mailbox, Received)).message == message(1)
        above.close()
        below.close()

    run(test)


def test_a_dial_calls_again_after_this_side_dropped_the_peer() -> None:
    async def test() -> None:
        below, above = Sockets(LinkSettings()), Sockets(LinkSettings())
        gateway, tokenizer = gateway_endpoint(), tokenizer_endpoint()
        above.dial(below.bind("tcp://127.0.0.1:*", tokenizer).address, gateway)
        first, _ = await both_up(Pair(gateway.mailbox, tokenizer.mailbox, above.close))
        first.drop("it sent nonsense")
        await take(gateway.mailbox, PeerDown)
        await take(tokenizer.mailbox, PeerDown)
        second, _ = await both_up(Pair(gateway.mailbox, tokenizer.mailbox, above.close))
        second.send(message(1))
        assert (await take(tokenizer.mailbox, Received)).message == message(1)
        above.close()
        below.close()

    run(test)


def test_a_send_to_a_peer_that_went_away_says_what_the_peer_said_last() -> None:
    async def test() -> None:
        below, above = Sockets(LinkSettings()), Sockets(LinkSettings())
        gateway, tokenizer = gateway_endpoint(), tokenizer_endpoint()
        above.dial(below.bind("tcp://127.0.0.1:*", tokenizer).address, gateway)
        to_tokenizer, to_gateway = await both_up(Pair(gateway.mailbox, tokenizer.mailbox, above.close))
        to_tokenizer.drop("more than it can take")

        def go_on_sending() -> None:
            for n in range(WINDOW):
                time.sleep(0.3)  # So that libzmq sees the end before the event loop has.
                to_gateway.send(message(n))

        with pytest.raises(PeerGone, match="more than it can take"):
            go_on_sending()
        above.close()
        below.close()

    run(test)


def test_a_peer_that_falls_silent_is_lost_by_its_missing_heartbeats() -> None:
    async def test() -> None:
        settings = LinkSettings(heartbeat_interval_ms=50, heartbeat_timeout_ms=200)
        below, above = Sockets(settings), Sockets(settings)
        gateway, tokenizer = gateway_endpoint(), tokenizer_endpoint()
        inbox = below.bind("tcp://127.0.0.1:*", tokenizer)
        async with Cable.to(inbox.address) as cable:
            above.dial(cable.address, gateway)
            await both_up(Pair(gateway.mailbox, tokenizer.mailbox, cable.cut))
            cable.freeze()
            await take(gateway.mailbox, PeerDown)
            await take(tokenizer.mailbox, PeerDown)
            above.close()
            below.close()

    run(test)


def test_links_that_leave_loopback_need_keys() -> None:
    async def test() -> None:
        sockets = Sockets(LinkSettings())
        for address in ("tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*"):
            with pytest.raises(OSError, match="legato keys new"):
                sockets.bind(address, tokenizer_endpoint())
        with pytest.raises(OSError, match="legato keys new"):
            sockets.dial("tcp://scheduler:5600", gateway_endpoint())
        sockets.close()

    run(test)


def test_only_holders_of_the_rings_keys_get_in() -> None:
    async def test() -> None:
        below = Sockets(LinkSettings(keys=new_keys()))
        tokenizer = tokenizer_endpoint()
        inbox = below.bind("tcp://127.0.0.1:*", tokenizer)
        for settings in (LinkSettings(), LinkSettings(keys=new_keys())):
            above = Sockets(settings)
            gateway = gateway_endpoint()
            above.dial(inbox.address, gateway)
            await asyncio.sleep(0.4)
            assert len(gateway.mailbox) == 0
            above.close()
        assert len(tokenizer.mailbox) == 0
        below.close()

    run(test)


@pytest.mark.parametrize(
    ("address", "leaves"),
    [
        ("tcp://127.0.0.1:5600", False),
        ("tcp://127.9.9.9:5600", False),
        ("tcp://[::1]:5600", False),
        ("tcp://localhost:5600", False),
        ("ipc:///tmp/socket", False),
        ("tcp://10.0.0.1:5600", True),
        ("tcp://*:5600", True),
        ("tcp://tokenizer:5600", True),
    ],
)
def test_what_leaves_loopback(address: str, leaves: bool) -> None:
    assert leaves_loopback(address) is leaves


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("tcp://scheduler:5600", ("scheduler", 5600)),
        ("tcp://ring.example:1", ("ring.example", 1)),
        ("tcp://10.0.0.1:5600", None),
        ("tcp://[::1]:5600", None),
        ("tcp://localhost:5600", None),
        ("ipc:///tmp/socket", None),
        ("tcp://scheduler", None),
        ("tcp://scheduler:many", None),
    ],
)
def test_which_addresses_hold_a_name_to_look_up(address: str, name: tuple[str, int] | None) -> None:
    assert name_in(address) == name


def test_a_peer_that_says_hello_and_is_gone_has_come_and_gone() -> None:
    """What the binding side answers finds nobody; its actor must hear of both, in that order."""
    mailbox = Mailbox()
    hello = Hello(role=Role.TOKENIZER, instance_id=new_instance_id(Role.TOKENIZER), window=WINDOW)
    endpoint = Endpoint(hello=hello, peer_roles=frozenset({Role.GATEWAY}), mailbox=mailbox)
    session = Session(endpoint, dialled=False, transmit=lambda data: False)
    session.receive(encode(Hello(role=Role.GATEWAY, instance_id=new_instance_id(Role.GATEWAY), window=WINDOW)))

    async def seen() -> list[type]:
        return [type(await anext(mailbox)), type(await anext(mailbox))]

    assert asyncio.run(seen()) == [PeerUp, PeerDown]


def test_who_is_dropped_as_soon_as_it_comes_comes_back_ever_more_seldom() -> None:
    async def test() -> int:
        num_up = 0
        below, above = Sockets(LinkSettings()), Sockets(LinkSettings())
        mailbox = Mailbox()
        hello = Hello(role=Role.TOKENIZER, instance_id=new_instance_id(Role.TOKENIZER), window=WINDOW)
        inbox = below.bind(
            "tcp://127.0.0.1:*", Endpoint(hello=hello, peer_roles=frozenset({Role.GATEWAY}), mailbox=mailbox)
        )
        other = Hello(role=Role.GATEWAY, instance_id=new_instance_id(Role.GATEWAY), window=WINDOW)
        above.dial(inbox.address, Endpoint(hello=other, peer_roles=frozenset({Role.TOKENIZER}), mailbox=Mailbox()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4):
                async for event in mailbox:
                    if isinstance(event, PeerUp):
                        num_up += 1
                        event.peer.drop("not you")
        above.close()
        below.close()
        return num_up

    assert 2 <= asyncio.run(test()) <= 8  # After 0.1, 0.2, 0.4, 0.8, 1.6, 2 s; every 0.1 s it would be 30.
