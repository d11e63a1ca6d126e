"""Late gaps by what lay in them, as far as plans tell: one rule for what was recorded and what is simulated."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.ids import RequestId, WorkerId
from common.messages.plans import IterationDone
from common.messages.streams import RequestArrived
from services.scheduler.events import (
    Effect,
    Event,
    RequestFinished,
    RequestPreempted,
    RunIteration,
    SendStreams,
    WorkerLost,
    WorkerReported,
)

SLOW_RATIO = 1.2
"""An iteration so many times longer than predicted counts as a slow device, whatever it computed."""


@dataclass(slots=True)
class _Stream:
    target_ns: int
    last_ns: int | None = None
    had_prefill: bool = False  # since its last token, of other requests beside it
    was_slow: bool = False
    computed_ns: int = 0  # since its last token, what its iterations took
    was_preempted: bool = False
    lost_worker: bool = False


@dataclass(slots=True)
class LateGaps:
    """Watches steps of a core. A gap is between tokens of one stream as the scheduler takes them in."""

    target_ns: int
    num_by_cause: Counter[str] = field(default_factory=Counter)
    num_gaps: int = 0
    max_gap_ns: int = 0
    _streams: dict[RequestId, _Stream] = field(default_factory=dict)
    _plans: dict[tuple[WorkerId, int, int], RunIteration] = field(default_factory=dict)

    @property
    def num_late(self) -> int:
        return sum(self.num_by_cause.values())

    def arrived(self, request: RequestArrived) -> None:
        """A request is there."""
        target_ms = request.tbt_target_ms
        self._streams[request.request_id] = _Stream(self.target_ns if target_ms is None else int(target_ms * 1e6))

    def planned(self, plan: RunIteration) -> None:
        """A plan is in flight."""
        self._plans[plan.worker_id, plan.epoch, plan.iteration] = plan

    def observe(self, now_ns: int, event: Event, effects: Sequence[Effect]) -> None:
        """Take in one step."""
        match event:
            case RequestArrived():
                self.arrived(event)
            case WorkerReported(report=IterationDone() as done):
                self._returned(event.worker_id, done)
            case WorkerLost():
                self._plans = {key: plan for key, plan in self._plans.items() if key[0] != event.worker_id}
                for watched in self._streams.values():
                    watched.lost_worker = True
            case _:
                pass
        for effect in effects:
            match effect:
                case RunIteration():
                    self.planned(effect)
                case RequestPreempted():
                    if (stream := self._streams.get(effect.request_id)) is not None:
                        stream.was_preempted = True
                case SendStreams():
                    for sampled in effect.batch.sampled:
                        self._sampled(sampled.request_id, now_ns)
                case RequestFinished():
                    self._streams.pop(effect.request_id, None)
                case _:
                    pass

    def _returned(self, worker_id: WorkerId, done: IterationDone) -> None:
        plan = self._plans.pop((worker_id, done.epoch, done.iteration), None)
        if plan is None:
            return
        took_ns = done.finished_ns - done.started_ns
        is_slow = took_ns > SLOW_RATIO * plan.predicted_ns
        for decode in plan.decodes:
            if (stream := self._streams.get(decode.request_id)) is not None:
                stream.had_prefill = stream.had_prefill or bool(plan.chunks)
                stream.was_slow = stream.was_slow or is_slow
                stream.computed_ns += took_ns

    def _sampled(self, request_id: RequestId, now_ns: int) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if stream.last_ns is not None:
            gap_ns = now_ns - stream.last_ns
            self.num_gaps += 1
            self.max_gap_ns = max(self.max_gap_ns, gap_ns)
            if gap_ns > stream.target_ns:
                self.num_by_cause[_cause(stream)] += 1
        self._streams[request_id] = _Stream(stream.target_ns, now_ns)


def _cause(stream: _Stream) -> str:
    if stream.lost_worker:
        return "worker_lost"
    if stream.was_preempted:
        return "preemption"
    if stream.computed_ns <= stream.target_ns:
        return "lag"  # Its iterations were in time; plans, results or the scheduler itself were not.
    if stream.was_slow:
        return "device_slow"
    return "prefill_interference" if stream.had_prefill else "over_capacity"
