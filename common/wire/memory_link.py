"""Links inside one process, for tests and simulations: the same sessions and bytes, no sockets.

Delivery is through the event loop, one callback a message, so that sender and receiver never run inside each other.
"""

import asyncio
from collections.abc import Callable

from common.wire.session import Endpoint, Session


class MemoryWire:
    """One connection between two endpoints, open from the start, that a test may cut."""

    def __init__(self, dialler: Endpoint, binder: Endpoint) -> None:
        self._is_cut = False
        self.dialled = Session(dialler, dialled=True, transmit=self._to_bound)
        self.bound = Session(binder, dialled=False, transmit=self._to_dialled)
        self.dialled.start()

    def cut(self) -> None:
        """Lose the connection: nothing more is delivered, and both ends notice."""
        self._is_cut = True
        self.dialled.end("the connection closed")
        self.bound.end("the connection closed")

    def _to_bound(self, data: bytes) -> bool:
        return self._deliver(lambda: self.bound.receive(data))

    def _to_dialled(self, data: bytes) -> bool:
        return self._deliver(lambda: self.dialled.receive(data))

    def _deliver(self, receive: Callable[[], None]) -> bool:
        if self._is_cut:
            return False
        asyncio.get_running_loop().call_soon(receive)
        return True
