"""The scheduler's spans: how long a request waited, and how its prompt was read (docs/tracing.md).

Written from the core's events and effects, of sampled requests alone; nothing of it decides anything.
"""

from dataclasses import dataclass, field

from common.clock import ms
from common.ids import RequestId
from common.messages.streams import RequestArrived, StreamBatch
from common.traceparent import is_sampled
from common.tracing import SpanEvent, Tracing
from services.scheduler.events import Effect, RequestFinished, RequestPreempted, RunIteration, SendStreams


@dataclass(slots=True)
class _Stage:
    """A sampled request that waits, or whose prompt is being read."""

    traceparent: str
    began_ns: int  # to wait, or to be read
    is_again: bool = False  # after a preemption
    is_planned: bool = False  # its prompt is being read
    events: list[SpanEvent] = field(default_factory=list)


class RequestSpans:
    """Follows sampled requests from their arrival to their first token, and again after each preemption. Bounded as
    the core is: it holds no more requests than that."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._stages: dict[RequestId, _Stage] = {}
        self._traceparents: dict[RequestId, str] = {}  # of all that have not ended
        self._num_planned = 0  # stages with is_planned

    def arrive(self, arrived: RequestArrived, now_ns: int) -> None:
        if is_sampled(arrived.traceparent) and arrived.request_id not in self._traceparents:
            self._traceparents[arrived.request_id] = arrived.traceparent
            self._stages[arrived.request_id] = _Stage(arrived.traceparent, now_ns)

    def note(self, effect: Effect, now_ns: int) -> None:
        """Something has been decided."""
        if not self._traceparents:
            return
        match effect:
            case RunIteration():
                self._note_plan(effect, now_ns)
            case SendStreams() if self._num_planned:
                self._note_tokens(effect.batch, now_ns)
            case RequestPreempted():
                self._preempt(effect, now_ns)
            case RequestFinished():
                self._finish(effect, now_ns)

    def _note_plan(self, plan: RunIteration, now_ns: int) -> None:
        for chunk in plan.chunks:
            stage = self._stages.get(chunk.request_id)
            if stage is None:
                continue
            if not stage.is_planned:
                self._write(chunk.request_id, stage, now_ns)
                stage.began_ns, stage.is_planned = now_ns, True
                self._num_planned += 1
            chunk_of = {
                "legato.chunk.start": chunk.start,
                "legato.chunk.tokens": chunk.num_tokens,
                "legato.iteration.number": plan.iteration,
                "legato.iteration.predicted_ms": ms(plan.predicted_ns),
                "legato.iteration.tokens": plan.num_tokens,
                "legato.iteration.bound": plan.bound.value,
                "legato.worker": plan.worker_id,
            }
            stage.events.append(SpanEvent("chunk", now_ns, chunk_of))

    def _note_tokens(self, batch: StreamBatch, now_ns: int) -> None:
        for sampled in batch.sampled:
            stage = self._stages.get(sampled.request_id)
            if stage is not None and stage.is_planned:
                self._leave(sampled.request_id, now_ns)

    def _preempt(self, preempted: RequestPreempted, now_ns: int) -> None:
        traceparent = self._traceparents.get(preempted.request_id)
        if traceparent is not None:
            self._leave(preempted.request_id, now_ns)
            self._stages[preempted.request_id] = _Stage(traceparent, now_ns, is_again=True)

    def _finish(self, finished: RequestFinished, now_ns: int) -> None:
        if self._traceparents.pop(finished.request_id, None) is not None:
            self._leave(finished.request_id, now_ns)

    def _leave(self, request_id: RequestId, now_ns: int) -> None:
        stage = self._stages.pop(request_id, None)
        if stage is not None:
            self._write(request_id, stage, now_ns)
            self._num_planned -= stage.is_planned

    def _write(self, request_id: RequestId, stage: _Stage, now_ns: int) -> None:
        self._tracing.write(
            "prefill" if stage.is_planned else "queue",
            stage.traceparent,
            stage.began_ns,
            now_ns,
            {"legato.request_id": request_id, "legato.after_preemption": stage.is_again},
            events=stage.events,
        )
