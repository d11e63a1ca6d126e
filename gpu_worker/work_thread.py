"""The life of a thread that owns a device: it builds what it needs, then takes work in the order given."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Built = TypeVar("Built")
Work = TypeVar("Work")

STOP_TIMEOUT_S = 10.0
"""How long the end of the process waits for the work (or the step of building) in hand."""


class WorkThread(Generic[Built, Work]):
    """Starts at once: first build, then work."""

    def __init__(
        self,
        *,
        build: Callable[[Callable[[], bool]], Built],
        on_built: Callable[[Built], None],
        on_failed: Callable[[BaseException], None],
        serve: Callable[[Built, Iterator[Work]], None],
    ) -> None:
        """All callables run in the thread. build is given a function that says whether to give up early; serve, all
        work until the end."""
        self._build = build
        self._on_built = on_built
        self._on_failed = on_failed
        self._serve = serve
        # Bounded by those who put work in: they look at num_queued first.
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._is_stopping = threading.Event()
        # A daemon: work that hangs, or waits for another process that is gone, must not keep this one alive.
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """How much work waits."""
        return self._work.qsize()

    def put(self, work: Work) -> None:
        self._work.put(work)

    def stop(self) -> None:
        """Finish the work in hand, drop the rest, and end. Waits STOP_TIMEOUT_S at most."""
        self._is_stopping.set()
        self._work.put(None)
        self._thread.join(STOP_TIMEOUT_S)

    def _main(self) -> None:
        try:
            built = self._build(self._is_stopping.is_set)
            if self._is_stopping.is_set():
                return
            self._on_built(built)
            self._serve(built, self._all_work())
        except BaseException as error:
            # Handed over, not handled: the event loop raises it, and the process dies with it.
            self._on_failed(error)

    def _all_work(self) -> Iterator[Work]:
        while (work := self._work.get()) is not None and not self._is_stopping.is_set():
            yield work
