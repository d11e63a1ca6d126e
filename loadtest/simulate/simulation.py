"""The simulation: discrete events around the scheduler core, under a virtual clock."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from common.messages.streams import RequestArrived
from loadtest.simulate.device import SimulatedWorker
from loadtest.simulate.measures import Measures, Outcome
from loadtest.simulate.requests import Arrival, request_of
from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Bound,
    DismissWorker,
    Effect,
    Event,
    PoolChanged,
    RequestFinished,
    RequestPreempted,
    RunIteration,
    SendStreams,
    TimerFired,
    WakeAt,
    WorkerJoined,
    WorkerReported,
)

Observer = Callable[[int, Event, tuple[Effect, ...]], None]
"""Told of each step of the core: when, the event, and its effects."""

CHECK_INTERVAL = 256
"""Events between two looks at whether the run's verdict is certain, and at its progress."""


class SimulationFailed(Exception):
    """The core and the simulated world do not agree; one of them has a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All that a simulation starts from. Used once: cores and workers keep state."""

    core: SchedulerCore
    joining: Sequence[WorkerJoined]
    workers: Sequence[SimulatedWorker]
    arrivals: Iterator[Arrival]
    targets_ns: Sequence[int]
    seed: int
    num_warmup: int = 0  # requests at the start that are not counted
    declared_max_tokens: int | None = None
    total_lens: dict[str, int] | None = None  # shared with the workers, where they draw ends of sequence
    ring_delay_ns: int = 0  # one way between scheduler and worker
    make_request: Callable[[Arrival], RequestArrived] | None = None  # instead of one with tokens of no meaning


class Simulation:
    """Runs a World to its end: until every request has ended, or its verdict is certain."""

    def __init__(self, world: World, observer: Observer | None = None) -> None:
        self.now_ns = 0
        num_stages = sum(worker.num_stages for worker in world.workers)
        self.measures = Measures(world.targets_ns, num_stages, world.seed, world.num_warmup)
        self._world = world
        self._core = world.core
        self._workers = {worker.worker_id: worker for worker in world.workers}
        self._observer = observer
        self._agenda: list[tuple[int, int, Event]] = []  # due, order, event
        self._order = 0

    def run(
        self,
        is_decided: Callable[[Measures, int], bool] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Outcome:
        """Return what came of it.

        Args:
            is_decided: Asked now and then, with the time; the run ends when it says so.
            on_progress: Told now and then how many requests have ended.
        """
        outcome = self.measures.outcome
        for joined in self._world.joining:
            self._step(joined)
        self._admit_next()
        num_events = 0
        while self._agenda:
            self.now_ns, _, event = heapq.heappop(self._agenda)
            if isinstance(event, RequestArrived):
                self.measures.note_arrival(event.request_id, self.now_ns)
                self._admit_next()
            elif isinstance(event, TimerFired) and not self.measures.num_open:
                continue  # What it would watch over has ended.
            self._step(event)
            if isinstance(event, WorkerReported):
                self.measures.note_kv_use(self._kv_use(), self.now_ns)
            num_events += 1
            if num_events % CHECK_INTERVAL == 0:
                if on_progress is not None:
                    on_progress(outcome.num_finished + outcome.num_rejected)
                if is_decided is not None and is_decided(self.measures, self.now_ns):
                    outcome.is_cut_short = True
                    break
        else:
            if self.measures.num_open:
                raise SimulationFailed(f"{self.measures.num_open} requests never ended, at {self.now_ns} ns")
        outcome.elapsed_ns = max((worker.last_finished_ns for worker in self._workers.values()), default=0)
        outcome.busy_ns = sum(worker.busy_ns for worker in self._workers.values())
        outcome.bubble_ns = sum(worker.bubble_ns for worker in self._workers.values())
        outcome.margin_ns = self._core.workers[0].margin.ns
        return outcome

    def _admit_next(self) -> None:
        """Put the next arrival on the agenda; there is never more than one."""
        arrival = next(self._world.arrivals, None)
        if arrival is None:
            return
        make = self._world.make_request
        request = request_of(arrival, self._world.declared_max_tokens) if make is None else make(arrival)
        if self._world.total_lens is not None:
            self._world.total_lens[request.request_id] = arrival.prompt_len + arrival.output_len
        self._push(arrival.due_ns, request)

    def _push(self, due_ns: int, event: Event) -> None:
        heapq.heappush(self._agenda, (due_ns, self._order, event))
        self._order += 1

    def _step(self, event: Event) -> None:
        effects = self._core.step(event, self.now_ns)
        if self._observer is not None:
            self._observer(self.now_ns, event, effects)
        outcome = self.measures.outcome
        for effect in effects:
            match effect:
                case RunIteration():
                    self._send(effect)
                case SendStreams():
                    self.measures.note_batch(effect.batch, self.now_ns)
                    if self._world.total_lens is not None:
                        for ended in effect.batch.ended:
                            self._world.total_lens.pop(ended.request_id, None)
                case WakeAt():
                    self._push(max(self.now_ns, effect.due_ns), TimerFired())
                case RequestPreempted():
                    outcome.num_preemptions += 1
                    outcome.num_recomputed_tokens += effect.num_tokens
                case DismissWorker():
                    raise SimulationFailed(f"the core dismissed {effect.worker_id}: {effect.detail}")
                case PoolChanged() | RequestFinished():
                    pass

    def _send(self, plan: RunIteration) -> None:
        for request in plan.introduced:
            self.measures.note_begin(request.request_id, self.now_ns)
        delay_ns = self._world.ring_delay_ns
        done = self._workers[plan.worker_id].run(plan, self.now_ns + delay_ns)
        self._push(done.finished_ns + delay_ns, WorkerReported(worker_id=plan.worker_id, report=done))
        outcome = self.measures.outcome
        outcome.num_iterations += 1
        outcome.num_bound += plan.bound is Bound.DEADLINE or plan.bound is Bound.FLOOR
        outcome.batch.add(len(plan.decodes) + len(plan.chunks))
        outcome.num_prefill_tokens += sum([chunk.num_tokens for chunk in plan.chunks])
        outcome.error_sum += abs(plan.predicted_ns / max(1, done.device_ns) - 1)

    def _kv_use(self) -> float:
        workers = self._core.workers
        return sum([1 - worker.pool.num_free / worker.pool.num_blocks for worker in workers]) / len(workers)
