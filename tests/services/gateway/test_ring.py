"""Which tokenizers the gateway talks to, as names come to stand for other addresses."""

import asyncio
from collections.abc import Iterable

from common.ids import new_instance_id
from common.messages.links import Hello, Role
from common.wire.zmq_link import Sockets
from common.wire.zmq_socket import LinkSettings
from services.gateway.core import StreamCore
from services.gateway.ring import Ring
from tests.services.gateway.test_core import call_of
from tests.services.gateway.world import BOUND_S, MODEL, Tokenizer

NAME = "tcp://tokenizer:5600"


class Names:
    """A name service that the test plays."""

    def __init__(self, *tokenizers: Tokenizer) -> None:
        self.stands_for: frozenset[str] | None = frozenset(each.address for each in tokenizers)
        self.was_asked = asyncio.Event()

    async def look_up(self, _: Iterable[str]) -> dict[str, frozenset[str]]:
        self.was_asked.set()
        return {} if self.stands_for is None else {NAME: self.stands_for}

    async def asked_again(self) -> None:
        for _ in range(2):  # The first answer may have been on its way already.
            self.was_asked.clear()
            await self.was_asked.wait()


class Bench:
    """A ring in this process, between names and tokenizers that the test plays."""

    def __init__(self, names: Names) -> None:
        self.sockets = Sockets(LinkSettings())
        self.core = StreamCore(retry_after_s=1)
        self.ring = Ring(
            self.sockets,
            Hello(role=Role.GATEWAY, instance_id=new_instance_id("gateway"), window=64),
            self.core,
            addresses=(NAME,),
            resolve_interval_s=0.01,
            retry_after_s=1,
            on_changed=lambda _: None,
            on_cut=lambda _: None,
            on_cards=self._on_cards,
            look_up=names.look_up,
        )
        self.has_card = asyncio.Event()

    def _on_cards(self) -> None:
        if MODEL in self.ring.cards():
            self.has_card.set()
        else:
            self.has_card.clear()


def test_a_new_address_is_dialled_and_a_vanished_one_is_left_when_it_has_nothing_open() -> None:
    async def test() -> None:
        old, new = Tokenizer(), Tokenizer()
        names = Names(old)
        bench = Bench(names)
        async with asyncio.timeout(BOUND_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(bench.ring.run(tasks))
            await bench.has_card.wait()
            call = call_of()
            bench.ring.submit(call)
            assert await old.submitted() == call.submits[0]

            names.stands_for = None  # Nobody answers: what was known stays.
            await names.asked_again()
            bench.ring.submit(call_of("b"))
            still_open = await old.submitted()
            bench.ring.close(call)

            bench.has_card.clear()
            names.stands_for = frozenset({new.address})
            await bench.has_card.wait()
            await names.asked_again()
            assert old.downs.empty(), "a request is still open there"
            for other in (call_of("c", n=3), call_of("d")):  # The second although more is open at the new address.
                bench.ring.submit(other)
                assert await new.submitted() == other.submits[0], "nothing new goes to an address that has vanished"

            for choice in still_open.choices:
                old.end(choice, 0)
            assert await old.lost() == "its address has vanished"
            running.cancel()
            bench.ring.hang_up()
            assert await new.lost() == "the gateway stopped"
        for each in (bench.sockets, old, new):
            each.close()

    asyncio.run(test())
