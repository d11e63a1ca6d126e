"""The thread of a rank that owns its device: it loads the rank's part, then runs iterations in the order given.

What a rank was given it runs, unlike a worker of one process, which skips the plans of a scheduler that is gone: the
other ranks have been given them too, and would wait.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from common.messages.plans import Plan, PlanRefused
from gpu_worker import metrics
from gpu_worker.device_thread import Connection
from gpu_worker.parallel.build import BuiltStage
from gpu_worker.profile import made_up_rows
from gpu_worker.slots import Iteration, Row
from gpu_worker.work_thread import WorkThread


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan's iteration, and what rank 0 needs for its result."""

    connection: Connection
    iteration: Iteration
    received_ns: int
    started_ns: int


@dataclass(frozen=True, slots=True)
class _PlanWork:
    connection: Connection
    plan: Plan
    received_ns: int


@dataclass(frozen=True, slots=True)
class _MadeUpWork:
    num_tokens: int


RunRows = Callable[[BuiltStage, Sequence[Row], Planned | None], None]
"""Runs this rank's part of an iteration and reports it; of none that was planned at start-up. In the device thread."""


class StageThread:
    """Starts at once: first build, then iterations."""

    def __init__(
        self,
        *,
        build: Callable[[Callable[[], bool]], BuiltStage],
        on_built: Callable[[BuiltStage], None],
        on_failed: Callable[[BaseException], None],
        run_rows: RunRows,
    ) -> None:
        """All callables run in this thread. build is given a function that says whether to give up early."""
        self._run_rows = run_rows
        self._thread: WorkThread[BuiltStage, _PlanWork | _MadeUpWork] = WorkThread(
            build=build, on_built=on_built, on_failed=on_failed, serve=self._serve
        )

    @property
    def num_queued(self) -> int:
        """Iterations that wait."""
        return self._thread.num_queued

    def submit(self, connection: Connection, plan: Plan, received_ns: int) -> None:
        self._thread.put(_PlanWork(connection, plan, received_ns))

    def submit_made_up(self, num_tokens: int) -> None:
        """Queue an iteration that no plan asks for: one of gpu_worker.profile."""
        self._thread.put(_MadeUpWork(num_tokens))

    def stop(self) -> None:
        """Finish the iteration in hand, drop the rest, and end. Waits STOP_TIMEOUT_S at most."""
        self._thread.stop()

    def _serve(self, built: BuiltStage, all_work: Iterator[_PlanWork | _MadeUpWork]) -> None:
        try:
            for work in all_work:
                match work:
                    case _PlanWork():
                        self._run_plan(built, work)
                    case _MadeUpWork():
                        self._run_rows(built, made_up_rows(built.limits, work.num_tokens), None)
        finally:
            built.stage.close()

    def _run_plan(self, built: BuiltStage, work: _PlanWork) -> None:
        started_ns = time.monotonic_ns()
        applied = work.connection.state.apply(work.plan)
        metrics.SLOTS_IN_USE.set(work.connection.state.num_slots_in_use)
        match applied:
            case PlanRefused() as refused:
                metrics.PLANS_REFUSED.inc()
                work.connection.on_result(refused)
            case Iteration() as iteration:
                self._run_rows(
                    built,
                    iteration.rows,
                    Planned(
                        connection=work.connection,
                        iteration=iteration,
                        received_ns=work.received_ns,
                        started_ns=started_ns,
                    ),
                )
