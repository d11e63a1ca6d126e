"""Iterations on their way through the stages, as rank 0 sees them: what each stage said, and the whole result."""

import queue
from collections import deque
from collections.abc import Callable

from common.clock import monotonic_ns
from common.messages.plans import IterationDone
from common.messages.ranks import StageDone
from gpu_worker import metrics
from gpu_worker.parallel.stage_thread import Planned


class Progress:
    """Puts the stages' reports together. Each stage reports every iteration, in one and the same order."""

    def __init__(self, num_stages: int, on_through: Callable[[Planned | None, StageDone], None]) -> None:
        """on_through takes each iteration that all stages are through with, None for one that nobody planned, and the
        last stage's report of it."""
        self._planned: deque[Planned | None] = deque()  # None: made up, and nobody's result
        self._reports: tuple[deque[StageDone], ...] = tuple(deque() for _ in range(num_stages))
        self._on_through = on_through

    def note_first(self, planned: Planned | None, done: StageDone) -> None:
        """The first stage is through with an iteration."""
        self._planned.append(planned)
        self.note(0, done)

    def note(self, stage: int, done: StageDone) -> None:
        """A stage is through with its next iteration."""
        self._reports[stage].append(done)
        while all(self._reports):
            self._finish(self._planned.popleft(), [reports.popleft() for reports in self._reports])

    def _finish(self, planned: Planned | None, reports: list[StageDone]) -> None:
        last = reports[-1]
        self._on_through(planned, last)
        if planned is None:
            return
        busy_ns, bubble_ns = sum(done.busy_ns for done in reports), sum(done.bubble_ns for done in reports)
        metrics.ITERATIONS.inc()
        metrics.TOKENS_COMPUTED.inc(sum(row.num_tokens for row in planned.iteration.rows))
        metrics.ITERATION_SECONDS.observe(busy_ns / 1e9)
        for stage, done in enumerate(reports):
            metrics.STAGE_BUSY_SECONDS.labels(stage=stage).inc(done.busy_ns / 1e9)
            metrics.STAGE_BUBBLE_SECONDS.labels(stage=stage).inc(done.bubble_ns / 1e9)
        planned.connection.on_result(
            IterationDone(
                epoch=planned.iteration.epoch,
                iteration=planned.iteration.iteration,
                slots=last.slots,
                token_ids=last.token_ids,
                received_ns=planned.received_ns,
                started_ns=planned.started_ns,
                finished_ns=monotonic_ns(),
                device_ns=busy_ns,
                bubble_ns=bubble_ns,
                sampled_scores=last.sampled_scores,
                prompt_scores=last.prompt_scores,
            )
        )


class Through:
    """Tells the device thread when all stages are through with an iteration of its own making."""

    def __init__(self, timeout_s: float) -> None:
        """timeout_s is how long to wait for that."""
        self._timeout_s = timeout_s
        self._noted: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def note(self) -> None:
        """They are. In any thread."""
        self._noted.put(True)

    def close(self) -> None:
        """End the wait, if there is one. In any thread."""
        self._noted.put(False)

    def wait(self) -> None:
        """Wait for the next one.

        Raises:
            RuntimeError: If they do not come through, or the worker is being stopped.
        """
        try:
            is_through = self._noted.get(timeout=self._timeout_s)
        except queue.Empty:
            raise RuntimeError(f"no stage has answered for {self._timeout_s:g} s") from None
        if not is_through:
            raise RuntimeError("the worker is being stopped")
