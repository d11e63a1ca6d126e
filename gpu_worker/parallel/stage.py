"""One rank's part of an iteration, and the tokens that come back to the first stage from the last."""

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from common.messages.ranks import StageDone
from gpu_worker.batch import flatten, passes
from gpu_worker.kv_cache import KvCache
from gpu_worker.parallel.forward import StageForward
from gpu_worker.parallel.layout import Layout
from gpu_worker.runner import Outcome, Runner
from gpu_worker.slots import Row

_UNKNOWN = 0
"""Stands for a sampled token on ranks that never look at tokens: all but the first one and the one that samples."""

Report = Callable[[StageDone], None]
"""Takes what came of a stage's part of an iteration."""


class Stage(Protocol):
    """Runs a rank's part of each iteration, together with the other ranks, who run theirs of the same rows."""

    def run(self, rows: Sequence[Row], report: Report) -> None:
        """Run an iteration, or launch it when there is a place for it; report is called, in order, in this thread or
        another.

        Raises:
            RuntimeError: If another rank is gone.
        """

    def take_back(self, token_ids: Sequence[int]) -> None:
        """On rank 0 of several stages: the last one is through with the oldest iteration that is out, and has drawn
        these. In any thread."""

    def interrupt(self) -> None:
        """End the wait for other ranks, if there is one that can be ended. In any thread."""

    def close(self) -> None:
        """Report what has been launched. In the thread that runs."""


class HostStage:
    """A rank on a CPU: an iteration is done when run returns."""

    def __init__(
        self,
        layout: Layout,
        forward: StageForward,
        kv_cache: KvCache,
        eos_token_ids: tuple[int, ...],
        max_logits: int,
        timeout_s: float,
    ) -> None:
        """max_logits is as the runner's, and the same on all ranks, so that they compute in the same passes; timeout_s
        is how long to wait for a token that is on its way."""
        self._layout = layout
        self._forward = forward
        self._kv_cache = kv_cache
        self._max_logits = max_logits
        self._runner = Runner(forward, kv_cache, eos_token_ids, max_logits)
        self._returns = Returns(timeout_s) if layout.rank == 0 and layout.pp > 1 else None

    def run(self, rows: Sequence[Row], report: Report) -> None:
        """As Stage.run. Sampled tokens join their requests here on the rank that samples; to rank 0 they come back
        later (see Returns)."""
        waited_ns = 0 if self._returns is None else self._returns.take_for(rows)
        started_ns, waited_before_ns = time.monotonic_ns(), self._forward.waited_ns
        outcome = Outcome()
        if self._layout.samples:
            outcome = self._runner.run(rows)
        elif rows:
            with torch.inference_mode():
                for together in passes(rows, self._max_logits):
                    self._forward(flatten(together, self._kv_cache.block_size))
            if self._layout.rank != 0:
                for row in rows:
                    if row.is_sampled:
                        row.resident.token_ids.append(_UNKNOWN)
        if self._returns is not None:
            self._returns.expect(rows)
        waited_inside_ns = self._forward.waited_ns - waited_before_ns
        report(
            StageDone(
                busy_ns=time.monotonic_ns() - started_ns - waited_inside_ns,
                bubble_ns=waited_ns + waited_inside_ns,
                slots=tuple(outcome.slots),
                token_ids=tuple(outcome.token_ids),
                sampled_scores=tuple(outcome.sampled_scores),
                prompt_scores=tuple(outcome.prompt_scores),
            )
        )

    def take_back(self, token_ids: Sequence[int]) -> None:
        if self._returns is not None:
            self._returns.put(token_ids)

    def interrupt(self) -> None:
        if self._returns is not None:
            self._returns.close()

    def close(self) -> None:
        pass  # Nothing is ever launched and not reported.


class Returns:
    """Sampled tokens on their way back to rank 0 of several stages, whose next rows may need them."""

    def __init__(self, timeout_s: float) -> None:
        """timeout_s is how long to wait for a token that is on its way."""
        self._timeout_s = timeout_s
        self._expected: deque[Sequence[Row]] = deque()
        self._returned: queue.SimpleQueue[Sequence[int] | None] = queue.SimpleQueue()

    def expect(self, rows: Sequence[Row]) -> None:
        """The first stage is through with these rows. In the device thread."""
        self._expected.append(rows)

    def put(self, token_ids: Sequence[int]) -> None:
        """All stages are through with the oldest iteration that is expected. In any thread."""
        self._returned.put(token_ids)

    def close(self) -> None:
        """End the wait, if there is one. In any thread."""
        self._returned.put(None)

    def take_for(self, rows: Sequence[Row]) -> int:
        """Wait until the tokens of all rows are known; return the nanoseconds that it took. In the device thread.

        Raises:
            RuntimeError: If they do not come, or the worker is being stopped.
        """
        while not self._returned.empty():
            self._take()
        if _are_known(rows):
            return 0
        started_ns = time.monotonic_ns()
        while not _are_known(rows):
            self._take()
        return time.monotonic_ns() - started_ns

    def _take(self) -> None:
        try:
            token_ids = self._returned.get(timeout=self._timeout_s)
        except queue.Empty:
            raise RuntimeError(f"no stage has answered for {self._timeout_s:g} s") from None
        if token_ids is None:
            raise RuntimeError("the worker is being stopped")
        sampled = [row for row in self._expected.popleft() if row.is_sampled]
        for row, token_id in zip(sampled, token_ids, strict=True):
            row.resident.token_ids.append(token_id)


def _are_known(rows: Sequence[Row]) -> bool:
    return all(row.start + row.num_tokens <= len(row.resident.token_ids) for row in rows)
