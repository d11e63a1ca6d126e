"""The scheduler's part of the account: what lies between two tokens of a stream at its worker, iteration by iteration.

Iterations of a worker end one after another, so the time between the ends of two of them is a sum over those that lie
between: of what each was predicted to take for its decodes, of what its prompts were predicted to add, of what it took
beyond that, and of the time for which the worker had no plan. Each result adds its four numbers to running sums (a
Tally), and the gap of any stream is a difference of two tallies: O(1), however many iterations it sat out. Streams that
had a token in the iteration before, nearly all, share one gap.

Iterations of a pipeline overlap: of each, only what it was predicted to add behind the end of the one before it counts
(InFlight.interval_ns), while the decodes that bring a token take their whole way through all stages.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.ids import RequestId
from common.messages.gaps import NO_GAP, Culprit, WorkerGap
from common.messages.plans import IterationDone
from services.scheduler.events import Chunk

if TYPE_CHECKING:
    from services.scheduler.request import Placement, Request
    from services.scheduler.worker import InFlight

MAX_TALLIES = 64
"""Iterations of a worker whose prompts are remembered, to name culprits. A gap over more names those of the last."""
MAX_CULPRITS = 8
"""Named with a gap: those that took the most."""
CULPRIT_SHARE = 0.5
"""Of the tightest target, the length from which a gap names its culprits: shorter ones become a stall by another's
doing, if at all."""


@dataclass(slots=True, eq=False, kw_only=True)
class Tally:
    """A worker's iterations summed up to the end of one of them."""

    worker_order: int  # of joining: a worker that comes back begins anew, under whatever name
    index: int = 0  # of results of this worker, over all epochs
    epoch: int = 0
    iteration: int = 0
    finished_ns: int = 0  # by the worker's clock
    applied_ns: int = 0  # by the scheduler's
    decode_ns: int = 0  # sum of what decodes alone were predicted to take, or to add to a pipeline's time
    prefill_ns: int = 0  # sum of what prompts were predicted to add
    slow_ns: int = 0  # sum of what iterations took beyond their prediction
    wait_ns: int = 0  # sum of the time without a plan
    own_decode_ns: int = 0  # of the last iteration; in a pipeline, through all stages
    own_prefill_ns: int = 0
    chunks: tuple[Chunk, ...] = ()  # the last iteration's
    prefilled: Sequence["Placement"] = ()  # parallel to chunks


@dataclass(slots=True, eq=False, kw_only=True)
class Interruption:
    """A stream lost its place on a worker between two tokens."""

    since: Tally  # of its last token
    is_worker_lost: bool
    num_recomputed_tokens: int
    culprit: Culprit | None = None  # who got its blocks


class Account:
    """One worker's tallies."""

    def __init__(self, worker_order: int) -> None:
        self.latest = Tally(worker_order=worker_order)
        self._recent: deque[Tally] = deque()  # without a bound of its own, which a snapshot would not keep

    def take(self, flight: "InFlight", done: IterationDone, now_ns: int) -> "Gaps":
        """Add a result; return what lies between its tokens and those before them."""
        before = self.latest
        predicted_ns = flight.interval_ns
        decode_ns = flight.decode_ns * predicted_ns // max(1, flight.plan.predicted_ns)
        spent_ns = done.finished_ns - before.finished_ns
        wait_ns = max(0, min(done.received_ns, done.finished_ns) - before.finished_ns)
        self.latest = Tally(
            worker_order=before.worker_order,
            index=before.index + 1,
            epoch=done.epoch,
            iteration=done.iteration,
            finished_ns=done.finished_ns,
            applied_ns=now_ns,
            decode_ns=before.decode_ns + decode_ns,
            prefill_ns=before.prefill_ns + predicted_ns - decode_ns,
            slow_ns=before.slow_ns + spent_ns - wait_ns - predicted_ns,
            wait_ns=before.wait_ns + wait_ns,
            own_decode_ns=flight.decode_ns,
            own_prefill_ns=predicted_ns - decode_ns,
            chunks=flight.plan.chunks,
            prefilled=flight.chunks,
        )
        self._recent.append(self.latest)
        if len(self._recent) > MAX_TALLIES:
            self._recent.popleft()
        for placement in flight.denied:
            placement.denied_decode_ns += decode_ns
            placement.denied_prefill_ns += predicted_ns - decode_ns
        return Gaps(before, self.latest, self._recent, flight.decodes)


class Gaps:
    """What lies between the tokens of one result and the tokens before them, each kind once."""

    def __init__(self, before: Tally, latest: Tally, recent: Iterable[Tally], decodes: Sequence["Placement"]) -> None:
        self.before = before
        self.latest = latest
        self._recent = recent
        self._decodes = decodes
        self._least_target_ns: int | None = None
        self._index_since: dict[int, int] = {}
        self.rows: list[WorkerGap] = []
        if decodes:
            self._index_since[before.index] = self._add(self._between(before))

    def index_of(self, placement: "Placement") -> int:
        """The index in rows of what lies before the token that this result brings a placement.

        The shortcut for nearly all is the caller's: where placement.tally is before, it is 0.
        """
        request, since = placement.request, placement.tally
        if (interruption := request.interruption) is not None:
            request.interruption = None
            return self._add(self._interrupted(interruption, request))
        if since is None:
            return NO_GAP
        decode_ns, prefill_ns = placement.denied_decode_ns, placement.denied_prefill_ns
        if decode_ns or prefill_ns:
            placement.denied_decode_ns = placement.denied_prefill_ns = 0
            return self._add(self._between(since, decode_ns, prefill_ns))
        index = self._index_since.get(since.index)
        if index is None:
            index = self._index_since[since.index] = self._add(self._between(since))
        return index

    def _add(self, gap: WorkerGap) -> int:
        self.rows.append(gap)
        return len(self.rows) - 1

    def _between(self, since: Tally, denied_decode_ns: int = 0, denied_prefill_ns: int = 0) -> WorkerGap:
        """Of a stream that was free to run, but for what iterations took that had no block for its next token."""
        latest = self.latest
        return WorkerGap(
            decode_ns=latest.own_decode_ns,
            prefill_interference_ns=latest.prefill_ns - since.prefill_ns - denied_prefill_ns,
            not_scheduled_ns=latest.decode_ns - since.decode_ns - latest.own_decode_ns - denied_decode_ns,
            kv_wait_ns=denied_decode_ns + denied_prefill_ns,
            plan_wait_ns=latest.wait_ns - since.wait_ns,
            device_slow_ns=latest.slow_ns - since.slow_ns,
            culprits=self._culprits(since, latest.finished_ns - since.finished_ns),
        )

    def _interrupted(self, interruption: Interruption, request: "Request") -> WorkerGap:
        """Of a stream that was computed again. Whatever its worker did meanwhile, this is why the stream waited."""
        latest, since = self.latest, interruption.since
        plan_wait_ns = device_slow_ns = 0
        if since.worker_order == latest.worker_order:
            plan_wait_ns, device_slow_ns = latest.wait_ns - since.wait_ns, latest.slow_ns - since.slow_ns
        rest_ns = gap_ns(since, latest) - latest.own_decode_ns - plan_wait_ns - device_slow_ns
        culprits = (interruption.culprit,) if interruption.culprit is not None else ()
        return WorkerGap(
            decode_ns=latest.own_decode_ns,
            preemption_ns=0 if interruption.is_worker_lost else rest_ns,
            plan_wait_ns=plan_wait_ns,
            worker_lost_ns=rest_ns if interruption.is_worker_lost else 0,
            device_slow_ns=device_slow_ns,
            num_recomputed_tokens=interruption.num_recomputed_tokens,
            culprits=culprits,
        )

    def _culprits(self, since: Tally, total_ns: int) -> tuple[Culprit, ...]:
        if self.latest.prefill_ns == since.prefill_ns or total_ns < CULPRIT_SHARE * self._tightest_ns():
            return ()
        found: dict[RequestId, Culprit] = {}
        for tally in self._recent:
            if tally.index > since.index and tally.chunks:
                _blame(tally, found)
        return tuple(sorted(found.values(), key=lambda culprit: -culprit.ns)[:MAX_CULPRITS])

    def _tightest_ns(self) -> int:
        if self._least_target_ns is None:
            self._least_target_ns = min([placement.request.tbt_target_ns for placement in self._decodes], default=0)
        return self._least_target_ns


def last_token(placement: "Placement") -> Tally | None:
    """The result that brought a stream's last token, on whatever worker; None before its first."""
    interruption = placement.request.interruption
    return placement.tally if interruption is None else interruption.since


def gap_ns(since: Tally, latest: Tally) -> int:
    """How long after a token another came; by the scheduler's clock where it came from another worker."""
    if since.worker_order == latest.worker_order:
        return latest.finished_ns - since.finished_ns
    return latest.applied_ns - since.applied_ns


def interrupt(placement: "Placement", *, is_worker_lost: bool, culprit: "Request | None" = None) -> None:
    """A placement ends before its request does. Remember since when its stream waits, if it has begun to stream."""
    request = placement.request
    earlier = request.interruption
    if (since := last_token(placement)) is None:
        return
    request.interruption = Interruption(
        since=since,
        is_worker_lost=is_worker_lost or (earlier is not None and earlier.is_worker_lost),
        num_recomputed_tokens=placement.num_computed + (0 if earlier is None else earlier.num_recomputed_tokens),
        culprit=None if culprit is None else Culprit(culprit.request_id, 0, 0, culprit.arrived.traceparent),
    )


def _blame(tally: Tally, found: dict[RequestId, Culprit]) -> None:
    """Divide what prompts added to an iteration among them, by their tokens; the last takes what rounding leaves."""
    left_ns, left_tokens = tally.own_prefill_ns, sum([chunk.num_tokens for chunk in tally.chunks])
    for chunk, placement in zip(tally.chunks, tally.prefilled, strict=True):
        share_ns = left_ns * chunk.num_tokens // left_tokens
        left_ns -= share_ns
        left_tokens -= chunk.num_tokens
        earlier = found.get(chunk.request_id)
        found[chunk.request_id] = Culprit(
            chunk.request_id,
            chunk.num_tokens + (0 if earlier is None else earlier.num_tokens),
            share_ns + (0 if earlier is None else earlier.ns),
            placement.request.arrived.traceparent,
        )
