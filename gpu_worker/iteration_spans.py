"""Spans of iterations: a sample of all, and each one that took part in a stall, as the scheduler says later on."""

import random
from collections import OrderedDict

from common.clock import ms
from common.messages.plans import IterationDone, Plan
from common.process import Process
from common.tracing import Tracing
from gpu_worker.config import WorkerConfig

MAX_REMEMBERED = 256
"""Iterations that may still be kept: a few seconds of them."""


class IterationSpans:
    """Remembers the latest iterations; writes those of which somebody will ask."""

    def __init__(self, tracing: Tracing, share: float, chance: random.Random) -> None:
        """share is of iterations that nobody asks for, how many are written all the same, in traces of their own."""
        self._tracing = tracing
        self._share = share
        self._chance = chance
        self._done: OrderedDict[tuple[int, int], IterationDone] = OrderedDict()

    def finish(self, done: IterationDone) -> None:
        """An iteration has finished."""
        if self._chance.random() < self._share:
            self._write(done, "")
        self._done[done.epoch, done.iteration] = done
        if len(self._done) > MAX_REMEMBERED:
            self._done.popitem(last=False)

    def keep(self, plan: Plan) -> None:
        """Write what a plan asks for, below each request that stalled."""
        for kept in plan.kept:
            if (done := self._done.get((kept.epoch, kept.iteration))) is not None:
                self._write(done, kept.traceparent)

    def _write(self, done: IterationDone, traceparent: str) -> None:
        self._tracing.write(
            "iteration",
            traceparent,
            done.started_ns,
            done.finished_ns,
            {
                "legato.iteration.number": done.iteration,
                "legato.epoch": done.epoch,
                "legato.iteration.sampled": len(done.slots),
                "legato.iteration.waited_ms": ms(done.started_ns - done.received_ns),
                "legato.iteration.device_ms": ms(done.device_ns),
                "legato.iteration.bubble_ms": ms(done.bubble_ns),
            },
        )


def spans_of(process: Process, config: WorkerConfig) -> IterationSpans | None:
    """The spans of this process's iterations; None where none are exported."""
    if process.tracing is None:
        return None
    return IterationSpans(process.tracing, config.iteration_trace_share, random.Random())
