"""What becomes of a stall: it is counted by cause, logged, and kept for its request's trace."""

from collections import deque
from typing import Any

import structlog

from common.account import Cause
from common.clock import NS_PER_S, ms
from services.gateway.account import Stall, StallCounts
from services.gateway.calls import Call

log = structlog.get_logger()

MAX_LATEST = 12
"""Stalls that the console shows."""


class StallReporter:
    """Of one gateway. Counts every stall; logs as many as max_lines_per_s allows, and says how many it has left out."""

    def __init__(self, *, max_lines_per_s: int) -> None:
        self.counts = StallCounts()
        self.latest: deque[Stall] = deque(maxlen=MAX_LATEST)  # for showing
        self._max_lines_per_s = max_lines_per_s
        self._second = 0  # the one that num_lines counts in
        self._num_lines = 0
        self._num_unlogged = 0

    def report(self, stall: Stall, call: Call) -> None:
        cause = stall.cause
        self.counts.add(cause, stall.gap_ns - stall.target_ns)
        self.latest.append(stall)
        if len(call.kept_stalls) < call.max_kept_stalls:
            call.kept_stalls.append(stall)
        if self._may_log(stall.at_ns):
            log.warning("stall", trace_id=call.trace_id, **fields_of(stall), num_unlogged=self._num_unlogged)
            self._num_unlogged = 0
        else:
            self._num_unlogged += 1

    def note_held_text(self, late_ns: int) -> None:
        """Tokens came in time, but for late_ns more than the target gave no text."""
        self.counts.add(Cause.HELD_TEXT, late_ns)

    def _may_log(self, now_ns: int) -> bool:
        second = now_ns // NS_PER_S
        if second != self._second:
            self._second, self._num_lines = second, 0
        self._num_lines += 1
        return self._num_lines <= self._max_lines_per_s


def fields_of(stall: Stall) -> dict[str, Any]:
    """The stall in words of the log; times in milliseconds, to the nanosecond, so that the parts sum to the gap."""
    worker = stall.account.worker
    return {
        "request_id": stall.request_id,
        "token_index": stall.index,
        "gap_ms": ms(stall.gap_ns),
        "target_ms": ms(stall.target_ns),
        "cause": stall.cause,
        "parts_ms": {name: ms(part_ns) for name, part_ns in stall.account.parts().items()},
        "worker": stall.stamps.worker_id,
        "iteration": stall.stamps.iteration,
        "num_recomputed_tokens": worker.num_recomputed_tokens,
        "culprits": [
            {"request_id": culprit.request_id, "num_tokens": culprit.num_tokens, "ms": ms(culprit.ns)}
            for culprit in worker.culprits
        ],
    }
