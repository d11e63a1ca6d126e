"""One rank's part of an iteration, and the tokens that come back to the first stage from the last."""

import queue
import time
from collections import deque
from collections.abc import Sequence

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


class Stage:
    """Runs a rank's part of each iteration. Used by one thread."""

    def __init__(
        self,
        layout: Layout,
        forward: StageForward,
        kv_cache: KvCache,
        eos_token_ids: tuple[int, ...],
        max_logits: int,
    ) -> None:
        """max_logits is as the runner's, and the same on all ranks, so that they compute in the same passes."""
        self._layout = layout
        self._forward = forward
        self._kv_cache = kv_cache
        self._max_logits = max_logits
        self._runner = Runner(forward, kv_cache, eos_token_ids, max_logits)

    def run(self, rows: Sequence[Row]) -> StageDone:
        """Run this rank's part of an iteration, together with the other ranks, who run theirs.

        On rank 0 each row's tokens must be known. Sampled tokens join their requests here on the rank that samples; to
        rank 0 they come back later (see Returns).

        Raises:
            RuntimeError: If another rank is gone.
        """
        started_ns = time.monotonic_ns()
        waited_ns = self._forward.waited_ns
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
        bubble_ns = self._forward.waited_ns - waited_ns
        return StageDone(
            busy_ns=time.monotonic_ns() - started_ns - bubble_ns,
            bubble_ns=bubble_ns,
            slots=tuple(outcome.slots),
            token_ids=tuple(outcome.token_ids),
            sampled_scores=tuple(outcome.sampled_scores),
            prompt_scores=tuple(outcome.prompt_scores),
        )


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

    def take_all(self) -> None:
        """Wait until every iteration has gone through all stages. In the device thread; raises as take_for."""
        while self._expected:
            self._take()

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
