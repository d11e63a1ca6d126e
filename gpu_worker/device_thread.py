"""The thread that owns the device: it loads the model, then runs plans in the order in which they came.

One thread for both, because OpenMP keeps its helpers per calling thread: what was measured is what will serve.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.messages.plans import IterationDone, Plan, PlanRefused
from gpu_worker import metrics
from gpu_worker.build import Built
from gpu_worker.cuda.pipeline import Pipeline
from gpu_worker.cuda.runner import CudaRunner
from gpu_worker.runner import Outcome, Runner
from gpu_worker.slots import Iteration, Limits, PlanState
from gpu_worker.work_thread import WorkThread


class Connection:
    """The plans of one connection to a scheduler. They begin from nothing, and end with it."""

    def __init__(self, limits: Limits, on_result: Callable[[IterationDone | PlanRefused], None]) -> None:
        """on_result is called in the device thread."""
        self.state = PlanState(limits)
        self.on_result = on_result
        self.is_lost = False  # Set by the event loop; the device thread then skips what is still queued.


@dataclass(frozen=True, slots=True)
class _QueuedPlan:
    connection: Connection
    plan: Plan
    received_ns: int


class DeviceThread:
    """Starts at once: first build, then plans."""

    def __init__(
        self,
        *,
        build: Callable[[Callable[[], bool]], Built],
        on_built: Callable[[Built], None],
        on_failed: Callable[[BaseException], None],
        max_queued_plans: int,
    ) -> None:
        """All callables run in the device thread. build is given a function that says whether to give up early."""
        self._max_queued_plans = max_queued_plans
        self._on_failed = on_failed
        self._thread: WorkThread[Built, _QueuedPlan] = WorkThread(
            build=build, on_built=on_built, on_failed=on_failed, serve=self._serve
        )

    def submit(self, connection: Connection, plan: Plan, received_ns: int) -> bool:
        """Queue a plan. False: the queue is full, and nothing was queued."""
        if self._thread.num_queued >= self._max_queued_plans:
            return False
        self._thread.put(_QueuedPlan(connection, plan, received_ns))
        return True

    def stop(self) -> None:
        """Finish the iteration in hand, drop the rest, and end. Waits STOP_TIMEOUT_S at most."""
        self._thread.stop()

    def _serve(self, built: Built, plans: Iterator[_QueuedPlan]) -> None:
        """Run plans until the end."""
        runner = built.runner
        if not isinstance(runner, CudaRunner):
            _run_plans(plans, lambda iteration, report: _run(runner, iteration, report))
            return
        pipeline = Pipeline(runner, self._on_failed)
        try:
            _run_plans(plans, lambda iteration, report: _launch(pipeline, iteration, report))
        finally:
            pipeline.close()


Report = Callable[[Outcome, int, int], None]
"""Takes what an iteration brought, the device's time in ns, and when it was finished."""
Execute = Callable[[Iteration, Report], None]
"""Runs an iteration, or launches it, and has it reported."""


def _run_plans(plans: Iterator[_QueuedPlan], execute: Execute) -> None:
    for queued in plans:
        if not queued.connection.is_lost:
            run_plan(execute, queued.connection, queued.plan, queued.received_ns)


def run_plan(execute: Execute, connection: Connection, plan: Plan, received_ns: int) -> None:
    """Apply one plan, have its iteration run, and report."""
    started_ns = time.monotonic_ns()
    applied = connection.state.apply(plan)
    metrics.SLOTS_IN_USE.set(connection.state.num_slots_in_use)
    match applied:
        case None:
            return
        case PlanRefused():
            metrics.PLANS_REFUSED.inc()
            connection.on_result(applied)
        case Iteration():
            execute(
                applied,
                lambda outcome, device_ns, finished_ns: connection.on_result(
                    _done(applied, outcome, received_ns, started_ns, finished_ns, device_ns)
                ),
            )


def _run(runner: Runner, iteration: Iteration, report: Report) -> None:
    """Run an iteration here and now. Its time on the device is the time it takes."""
    started_ns = time.monotonic_ns()
    outcome = runner.run(iteration.rows)
    finished_ns = time.monotonic_ns()
    report(outcome, finished_ns - started_ns, finished_ns)


def _launch(pipeline: Pipeline, iteration: Iteration, report: Report) -> None:
    """Give an iteration to the device; another thread reports it."""
    slots = [row.resident.slot for row in iteration.rows if row.is_sampled]
    pipeline.run(
        iteration.rows,
        lambda computed, at_ns: report(
            Outcome(slots, computed.token_ids, computed.sampled_scores, computed.prompt_scores),
            computed.device_ns,
            at_ns,
        ),
    )


def _done(
    iteration: Iteration, outcome: Outcome, received_ns: int, started_ns: int, finished_ns: int, device_ns: int
) -> IterationDone:
    metrics.ITERATIONS.inc()
    metrics.TOKENS_COMPUTED.inc(sum(row.num_tokens for row in iteration.rows))
    metrics.ITERATION_SECONDS.observe(device_ns / 1e9)
    return IterationDone(
        epoch=iteration.epoch,
        iteration=iteration.iteration,
        slots=tuple(outcome.slots),
        token_ids=tuple(outcome.token_ids),
        received_ns=received_ns,
        started_ns=started_ns,
        finished_ns=finished_ns,
        device_ns=device_ns,
        sampled_scores=tuple(outcome.sampled_scores),
        prompt_scores=tuple(outcome.prompt_scores),
    )
