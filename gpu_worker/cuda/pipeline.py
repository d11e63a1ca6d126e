"""Iterations one ahead: one thread gives them to the device, another waits for what comes of them.

While the second waits it holds no lock, so the first can prepare and launch the next iteration meanwhile.
"""

import queue
import threading
import time
from collections.abc import Callable

from gpu_worker.cuda.results import Computed, Launched
from gpu_worker.cuda.runner import CudaRunner
from gpu_worker.slots import Row

STOP_TIMEOUT_S = 5.0
"""How long the end waits for the iterations that the device has."""

Report = Callable[[Computed, int], None]
"""Takes what came of an iteration, and when, on the monotonic clock."""


class Pipeline:
    """At most runner.max_in_flight iterations are launched and not reported. Used by one thread."""

    def __init__(self, runner: CudaRunner, on_failed: Callable[[BaseException], None]) -> None:
        """on_failed is called in the waiting thread, once, with what a wait or a report raised; nothing runs after."""
        self._runner = runner
        self._on_failed = on_failed
        self._has_failed = threading.Event()
        self._places = threading.Semaphore(runner.max_in_flight)
        # Never full: the semaphore lets no more in. One place more for the end.
        self._launched: queue.Queue[tuple[Launched | None, Report] | None] = queue.Queue(runner.max_in_flight + 1)
        self._thread = threading.Thread(target=self._main, name="results", daemon=True)
        self._thread.start()

    def run(self, rows: tuple[Row, ...], report: Report) -> None:
        """Launch an iteration when there is a place for it; report is called in the other thread, in order.

        One without rows is not launched, and reported in its turn.
        """
        self._places.acquire()
        if self._has_failed.is_set():
            self._places.release()  # For the next: nobody gives any back now.
            return  # Whoever needs to know has been told.
        self._launched.put_nowait((self._runner.launch(rows) if rows else None, report))

    def close(self) -> None:
        """Report what is in flight, and end. Waits STOP_TIMEOUT_S at most."""
        self._launched.put_nowait(None)
        self._thread.join(STOP_TIMEOUT_S)

    def _main(self) -> None:
        try:
            self._runner.device.enter_thread()
            while (item := self._launched.get()) is not None:
                launched, report = item
                computed = Computed([], 0) if launched is None else launched.wait()
                finished_ns = time.monotonic_ns()
                # Its buffers are free: the next may be launched before this one is reported.
                self._places.release()
                report(computed, finished_ns)
        except BaseException as error:
            self._has_failed.set()
            self._places.release()  # Whoever waits for a place must see that none will come.
            self._on_failed(error)
