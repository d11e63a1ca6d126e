"""One inbox per actor: everything that can happen to it, in the order in which it happened."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_BURST = 64
"""Events handed out in a row before the loop's other tasks (HTTP, timers) get a turn."""


class Mailbox:
    """An async iterator over events. It ends when closed.

    Bounded by its writers: links put at most a window per connection (common.wire.session), and whatever else puts
    (answers of executors, HTTP handlers) is bounded by what it answers.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[Any, Callable[[], None] | None]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self._burst = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_ns = 0

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: object, on_taken: Callable[[], None] | None = None) -> None:
        """Add an event. on_taken is called when the actor takes it. Events after close are dropped."""
        if self._is_closed:
            return
        self._events.append((event, on_taken))
        self._wake()

    def close(self) -> None:
        """End the iteration once the events already here are taken."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def wake_at(self, event: object, due_ns: int, now_ns: int) -> None:
        """Put event at due_ns unless an earlier call to wake_at is still to come; one timer serves an actor."""
        if self._is_closed or (self._timer is not None and self._timer_due_ns <= due_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_ns = due_ns
        delay_s = max(0, due_ns - now_ns) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire, event)

    def __aiter__(self) -> "Mailbox":
        return self

    async def __anext__(self) -> Any:
        if self._burst >= MAX_BURST:
            self._burst = 0
            await asyncio.sleep(0)
        while not self._events:
            if self._is_closed:
                raise StopAsyncIteration
            self._burst = 0
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._burst += 1
        event, on_taken = self._events.popleft()
        if on_taken is not None:
            on_taken()
        return event

    def _fire(self, event: object) -> None:
        self._timer = None
        self.put(event)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
