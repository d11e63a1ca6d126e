"""What a recording tells of its load and of its devices."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from common.cost.fit import SavedFit
from common.ids import RequestId, pack_ids
from common.messages.cards import WorkerCard
from common.messages.streams import RequestArrived
from loadtest.simulate.measures import Measures, Outcome
from loadtest.whatif.causes import LateGaps
from services.scheduler.events import Effect, RequestPreempted, RunIteration, SendStreams, WorkerJoined
from services.scheduler.limits import Limits
from services.scheduler.recording.segment import BadRecording, Segment, StepDecoder, event_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRequest:
    """One request of the recording."""

    due_ns: int  # from the segment's beginning; 0 for those that were open then
    arrived: RequestArrived  # with all tokens that were known at due_ns
    num_output_tokens: int  # over all, as many as it was seen to have; where its end was not seen, as many as it may


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A segment, as far as a simulation needs it."""

    limits: Limits
    requests: list[PastRequest]
    num_open_at_start: int
    cards: list[WorkerCard]  # of the workers that were there, or came
    fit: SavedFit  # of the first worker, at the end: how long its iterations take
    error: float  # mean relative error of that
    duration_ns: int
    outcome: Outcome
    late: LateGaps


def read_past(path: Path) -> Past:
    """Run a segment again, and note its load.

    Raises:
        BadRecording: If it cannot be read, or no worker was there.
        OSError: If the file cannot be read.
    """
    segment = Segment(path)
    core, decoder, start_ns = segment.core(), StepDecoder(), segment.head.now_ns
    limits = segment.head.limits
    late = LateGaps(limits.tbt_target_ns)
    cards = [worker.card for worker in core.workers]
    found: dict[RequestId, tuple[int, RequestArrived]] = {}
    num_outputs: Counter[RequestId] = Counter()
    ended: set[RequestId] = set()
    open_requests = core.open_requests
    measures = Measures([limits.tbt_target_ns], max(1, len(cards)), 0, len(open_requests))
    for worker in core.workers:
        for flight in worker.in_flight:
            late.planned(flight.plan)
    for request in open_requests:
        found[request.request_id] = (0, _with_tokens(request.arrived, pack_ids(request.token_ids)))
        num_outputs[request.request_id] = request.num_output_tokens
        late.arrived(request.arrived)
        measures.note_arrival(request.request_id, 0)
    now_ns = start_ns
    for step in segment.steps():
        event, effects, now_ns = event_of(step), decoder.effects(step), step.now_ns
        core.step(event, now_ns)
        late.observe(now_ns, event, effects)
        if isinstance(event, RequestArrived) and event.request_id not in found:
            found[event.request_id] = (now_ns - start_ns, event)
            measures.note_arrival(event.request_id, now_ns - start_ns)
        if isinstance(event, WorkerJoined):
            cards.append(event.card)
        _note(effects, now_ns - start_ns, measures, num_outputs, ended)
    if not cards or not core.workers:
        raise BadRecording(f"{path}: no worker was there at its end, so nothing tells how long an iteration takes")
    measures.outcome.elapsed_ns = now_ns - start_ns
    seen = [num_outputs[request_id] for request_id in ended]
    usual = int(median(seen)) if seen else 1
    return Past(
        limits=limits,
        requests=[
            PastRequest(
                due_ns=due_ns,
                arrived=arrived,
                num_output_tokens=_output_len(arrived, num_outputs[request_id], request_id in ended, usual),
            )
            for request_id, (due_ns, arrived) in found.items()
        ],
        num_open_at_start=len(open_requests),
        cards=cards,
        fit=core.workers[0].fit.save(),
        error=core.workers[0].fit.error,
        duration_ns=now_ns - start_ns,
        outcome=measures.outcome,
        late=late,
    )


def _note(
    effects: list[Effect], at_ns: int, measures: Measures, num_outputs: Counter[RequestId], ended: set[RequestId]
) -> None:
    outcome = measures.outcome
    for effect in effects:
        match effect:
            case SendStreams():
                for sampled in effect.batch.sampled:
                    num_outputs[sampled.request_id] = sampled.first_index + len(sampled.token_ids)
                ended.update(end.request_id for end in effect.batch.ended)
                measures.note_batch(effect.batch, at_ns)
            case RunIteration():
                outcome.num_iterations += 1
                for request in effect.introduced:
                    measures.note_begin(request.request_id, at_ns)
            case RequestPreempted():
                outcome.num_preemptions += 1
            case _:
                pass


def _output_len(arrived: RequestArrived, num_seen: int, has_ended: bool, usual: int) -> int:
    """Output tokens until it ends. One that was refused would have had as many as others had; one whose end the
    recording does not hold goes on as long as it may."""
    if not has_ended:
        return arrived.max_tokens
    return min(arrived.max_tokens, max(1, num_seen or usual))


def _with_tokens(arrived: RequestArrived, token_ids: bytes) -> RequestArrived:
    return msgspec.structs.replace(arrived, token_ids=token_ids)
