"""The scheduler: a deterministic state machine that decides what runs next, where, and with how many tokens."""

from math import inf
from typing import assert_never

from common.cost.devices import DEVICES
from common.ids import RequestId, Slot, TokenizerId, WorkerId
from common.messages.cards import PoolCard
from common.messages.logprobs import TokenScores
from common.messages.plans import IterationDone, PlanRefused, SlotScores
from common.messages.requests import (
    Cancel,
    FinishReason,
    RejectReason,
    RequestEnded,
    RequestQueued,
    RequestRejected,
    Stamps,
)
from common.messages.streams import PromptScored, RequestArrived, StopReached, TokensSampled
from services.scheduler.account import Gaps, interrupt
from services.scheduler.admission import Refusal, refusal_of
from services.scheduler.answers import answers
from services.scheduler.budget import Budget, budget_of
from services.scheduler.events import (
    DismissWorker,
    Effect,
    Event,
    PoolChanged,
    RequestFinished,
    RunIteration,
    TimerFired,
    TokenizerLost,
    WakeAt,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from services.scheduler.limits import Limits
from services.scheduler.outboxes import Outboxes
from services.scheduler.planner import Planner
from services.scheduler.request import Placement, Request
from services.scheduler.waiting import Ahead, WaitingQueue
from services.scheduler.worker import Worker


class SchedulerCore:
    """Decides what runs next. Never waits, logs, reads a clock or touches a socket.

    One core serves one pool: workers that all hold the same model.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._workers: dict[WorkerId, Worker] = {}  # in order of joining
        self._requests: dict[RequestId, Request] = {}  # not ended
        self._waiting = WaitingQueue()
        self._planner = Planner(limits, self._waiting, self._workers)
        self._pool_card: PoolCard | None = None
        self._num_arrived = 0
        self._num_joined = 0
        self._wake_due_ns: int | None = None
        self._num_gaps_gone = self._num_late_gone = 0  # of workers that are gone
        # Of the current step: plans, what goes to each tokenizer in one message, and all else.
        self._plans: list[RunIteration] = []
        self._told: list[Effect] = []
        self._outboxes = Outboxes()
        self._new_due_ns: int | None = None  # the earliest moment that became worth waking for

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def pool_card(self) -> PoolCard | None:
        """The pool as last told; None before the first worker has come."""
        return self._pool_card

    @property
    def workers(self) -> tuple[Worker, ...]:
        """For gauges and checks; not to be changed."""
        return tuple(self._workers.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_gaps(self) -> int:
        """Gaps between two tokens of one stream so far, at the workers; between two workers, here."""
        return self._num_gaps_gone + sum(worker.num_gaps for worker in self._workers.values())

    @property
    def num_late_gaps(self) -> int:
        """Of num_gaps, those above their stream's target."""
        return self._num_late_gone + sum(worker.num_late for worker in self._workers.values())

    @property
    def open_requests(self) -> tuple[Request, ...]:
        """Requests that have not been told their end, in order of arrival; not to be changed."""
        return tuple(self._requests.values())

    def is_open(self, request_id: RequestId) -> bool:
        """Whether such a request has been admitted and not been told its end."""
        return request_id in self._requests

    @property
    def num_open(self) -> int:
        """Requests that have not been told their end."""
        return len(self._requests)

    def predicted_wait_ns(self, ahead: Ahead | None = None) -> int:
        """How long a request with so much before it, or all that waits, will wait before it begins, as far as can be
        said."""
        tokens_per_s = sum(worker.prefill_tokens_per_s for worker in self._workers.values())
        return self._waiting.predicted_wait_ns(tokens_per_s, ahead)

    def budget(self, worker: Worker, now_ns: int) -> Budget:
        """What the worker's next iteration may hold, and why. Changes nothing."""
        room, decoding = self._planner.room(worker, now_ns)
        return budget_of(worker, room, decoding, self._limits)

    def step(self, event: Event, now_ns: int) -> tuple[Effect, ...]:
        """Apply one event; return, in order, what the world must now be told.

        Plans come first: a device may idle until they leave, while text can wait.
        """
        self._plans, self._told, self._outboxes, self._new_due_ns = [], [], Outboxes(), None
        match event:
            case RequestArrived():
                self._arrive(event, now_ns)
            case Cancel():
                for request_id in event.request_ids:
                    if (request := self._requests.get(request_id)) is not None:
                        self._end(request, FinishReason.CANCELLED, now_ns)
            case StopReached():
                if (request := self._requests.get(event.request_id)) is not None:
                    self._end(request, FinishReason.STOP, now_ns, is_told=False)
            case WorkerReported():
                self._hear(event, now_ns)
            case WorkerJoined():
                self._join(event)
            case WorkerLost():
                self._lose(event.worker_id, event.detail, now_ns)
            case TokenizerLost():
                for request in list(self._requests.values()):
                    if request.arrived.tokenizer_id == event.tokenizer_id:
                        self._end(request, FinishReason.CANCELLED, now_ns, is_told=False)
            case TimerFired():
                self._wake_due_ns = None
                self._expire(now_ns)
            case _:
                assert_never(event)
        self._plan_workers(now_ns)
        self._ask_to_be_woken()
        return (*self._plans, *self._outboxes.effects(), *self._told)

    # --- requests come and go ---------------------------------------------------------------------------------------

    def _arrive(self, arrived: RequestArrived, now_ns: int) -> None:
        outbox = self._outboxes.of(arrived.tokenizer_id)
        allowed_wait_ns = self._limits.queue_timeout_ns
        if arrived.deadline_ms is not None:
            allowed_wait_ns = min(allowed_wait_ns, int(arrived.deadline_ms * 1e6))
        ahead = self._ahead_of(arrived, now_ns)
        refusal = refusal_of(
            arrived,
            self._limits,
            num_waiting=len(self._waiting),
            num_before=ahead.num_requests,
            capacity=max((worker.capacity for worker in self._workers.values()), default=None),
            predicted_wait_ns=self.predicted_wait_ns(ahead),
            allowed_wait_ns=allowed_wait_ns,
        )
        if arrived.request_id in self._requests:
            refusal = Refusal(RejectReason.INVALID, f"request {arrived.request_id} is running already")
        if refusal is not None:
            outbox.ended.append(
                RequestRejected(
                    request_id=arrived.request_id,
                    attempt=arrived.attempt,
                    reason=refusal.reason,
                    detail=refusal.detail,
                    retry_after_s=refusal.retry_after_s,
                )
            )
            return
        target_ms = arrived.tbt_target_ms
        request = Request.of(
            arrived,
            order=self._num_arrived,
            now_ns=now_ns,
            queue_deadline_ns=now_ns + allowed_wait_ns,
            tbt_target_ns=self._limits.tbt_target_ns if target_ms is None else int(target_ms * 1e6),
        )
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)
        self._note_due(request.queue_deadline_ns)
        outbox.queued.append(
            RequestQueued(
                request_id=arrived.request_id, attempt=arrived.attempt, num_prompt_tokens=arrived.num_prompt_tokens
            )
        )

    def _ahead_of(self, arrived: RequestArrived, now_ns: int) -> Ahead:
        """What would begin before it. Short prompts go first where prompts wait to be read, but not where the first of
        them waits for room."""
        workers, placer = self._planner.counted_on(now_ns), self._planner.placer
        first = placer.first_that_fits(workers, self._waiting)
        has_room = first is not None and placer.has_room(workers, first)
        return self._waiting.ahead_of(
            arrived.priority,
            arrived.num_prompt_tokens,
            self._planner.num_places if has_room else 1,
            is_shared=self._limits.has_prefix_cache,
        )

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now_ns: int,
        *,
        stop: int | None = None,
        detail: str = "",
        is_told: bool = True,
    ) -> None:
        """The one way out for a request that was admitted. Its blocks follow when no plan in flight names it."""
        assert not request.has_ended
        request.has_ended = True
        del self._requests[request.request_id]
        if is_told:
            self._outboxes.of(request.arrived.tokenizer_id).ended.append(
                RequestEnded(
                    request_id=request.request_id,
                    attempt=request.arrived.attempt,
                    reason=reason,
                    num_prompt_tokens=request.arrived.num_prompt_tokens,
                    num_output_tokens=request.num_output_tokens,
                    num_cached_tokens=request.num_cached_tokens,
                    num_preemptions=request.num_preemptions,
                    stop=stop,
                    detail=detail,
                )
            )
        self._note_end(request, reason, now_ns)
        if request.placement is None:
            self._waiting.remove(request)
            return
        self._planner.placer.note_output(request.num_output_tokens)
        request.placement.worker.running.remove(request)
        if request.placement.num_in_flight == 0:
            self._release(request)

    def _note_end(self, request: Request, reason: str, now_ns: int) -> None:
        began_ns = now_ns if request.first_planned_ns is None else request.first_planned_ns
        self._told.append(
            RequestFinished(
                request_id=request.request_id,
                reason=reason,
                num_prompt_tokens=request.arrived.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_preemptions=request.num_preemptions,
                queue_ns=began_ns - request.arrived_ns,
            )
        )

    def _release(self, request: Request) -> None:
        assert request.placement is not None
        request.placement.worker.give_back(request.placement)
        request.placement = None

    def _expire(self, now_ns: int) -> None:
        for request in [request for request in self._waiting if self._may_expire(request)]:
            if request.queue_deadline_ns <= now_ns:
                self._give_up(request, now_ns)
            else:
                self._note_due(request.queue_deadline_ns)
        for worker in list(self._workers.values()):
            if worker.in_flight and worker.in_flight[0].timeout_ns <= now_ns:
                late = worker.in_flight[0].plan
                self._dismiss(worker, f"iteration {late.iteration} of epoch {late.epoch} brought no result", now_ns)
            elif worker.in_flight:
                self._note_due(worker.in_flight[0].timeout_ns)

    def _may_expire(self, request: Request) -> bool:
        """A queue deadline is for requests that have not begun. One that has, has shown tokens already, and waits for
        its place as long as any worker can hold it."""
        return request.first_planned_ns is None or not self._can_be_held(request)

    def _can_be_held(self, request: Request) -> bool:
        return any(self._planner.placer.can_ever_hold(worker, request) for worker in self._workers.values())

    def _give_up(self, request: Request, now_ns: int) -> None:
        if request.first_planned_ns is not None:
            message = f"no worker that can hold it has come since one was lost; {len(self._workers)} workers are up"
            self._end(request, FinishReason.ERROR, now_ns, detail=message)
            return
        request.has_ended = True
        del self._requests[request.request_id]
        self._waiting.remove(request)
        waited_s = (now_ns - request.arrived_ns) / 1e9
        reason = RejectReason.QUEUE_TIMEOUT if self._workers else RejectReason.UNAVAILABLE
        self._outboxes.of(request.arrived.tokenizer_id).ended.append(
            RequestRejected(
                request_id=request.request_id,
                attempt=request.arrived.attempt,
                reason=reason,
                detail=f"waited {waited_s:.1f} s for a worker with room; {len(self._workers)} workers are up",
                retry_after_s=max(1.0, self.predicted_wait_ns() / 1e9),
            )
        )
        self._note_end(request, reason, now_ns)

    # --- workers come and go ----------------------------------------------------------------------------------------

    def _join(self, event: WorkerJoined) -> None:
        known, card = self._pool_card, event.card
        problem = ""
        if known is not None and self._workers and card.model != known.model:
            problem = f"this pool serves {known.model.name!r}, and the worker holds another model: {card.model}"
        elif card.device_kind not in DEVICES:
            problem = f"no figures for its device kind {card.device_kind!r}; known: {', '.join(DEVICES)}"
        if problem:
            self._told.append(DismissWorker(worker_id=event.worker_id, detail=problem))
            return
        self._workers[event.worker_id] = Worker(event.worker_id, card, self._num_joined, self._limits, event.fit)
        self._num_joined += 1
        self._tell_pool()

    def _lose(self, worker_id: WorkerId, detail: str, now_ns: int) -> None:
        """The worker and its KV are gone: what it ran waits again, with all tokens that it is known to have sampled."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        self._num_gaps_gone += worker.num_gaps
        self._num_late_gone += worker.num_late
        for request in list(worker.running):
            request.num_losses += 1
            if request.num_losses >= self._limits.max_losses:
                message = f"{request.num_losses} workers were lost while they ran it; the last: {detail}"
                assert request.placement is not None
                request.placement.num_in_flight = 0  # Nothing of this worker returns.
                self._end(request, FinishReason.ERROR, now_ns, detail=message)
            else:
                interrupt(request.placed, is_worker_lost=True)
                request.placement = None
                self._waiting.add(request)
        for request in self._waiting:
            if request.first_planned_ns is not None and not self._can_be_held(request):
                request.queue_deadline_ns = now_ns + self._limits.queue_timeout_ns
                self._note_due(request.queue_deadline_ns)
        if not self._workers:
            self._waiting.forget_last_start()
        self._tell_pool()

    def _dismiss(self, worker: Worker, detail: str, now_ns: int) -> None:
        self._told.append(DismissWorker(worker_id=worker.worker_id, detail=detail))
        self._lose(worker.worker_id, detail, now_ns)

    def _tell_pool(self) -> None:
        workers = self._workers.values()
        if workers:
            model = next(iter(workers)).card.model
        else:
            assert self._pool_card is not None
            model = self._pool_card.model
        self._pool_card = PoolCard(
            model=model,
            num_workers=len(workers),
            kv_capacity=max((worker.capacity for worker in workers), default=0),
            tbt_target_ms=self._limits.tbt_target_ns / 1e6,
        )
        self._told.append(PoolChanged(card=self._pool_card))

    # --- results ----------------------------------------------------------------------------------------------------

    def _hear(self, event: WorkerReported, now_ns: int) -> None:
        worker = self._workers.get(event.worker_id)
        report = event.report
        if worker is None or report.epoch != worker.epoch:
            return  # Of a worker that counts as lost, or of an epoch that a refusal ended.
        match report:
            case IterationDone():
                self._advance(worker, report, now_ns)
            case PlanRefused():
                self._open_epoch(worker, report, now_ns)
            case _:
                assert_never(report)

    def _advance(self, worker: Worker, done: IterationDone, now_ns: int) -> None:
        flight = worker.in_flight[0] if worker.in_flight else None
        if flight is None or flight.plan.iteration != done.iteration or not answers(flight, done):
            self._dismiss(worker, f"its result {done.iteration} answers no plan in flight", now_ns)
            return
        worker.in_flight.popleft()
        worker.num_refusals = 0
        gaps = worker.account.take(flight, done, now_ns)
        worker.observe(flight, done, now_ns, self._limits)
        self._outboxes.note_result(Stamps(worker.worker_id, done.iteration, done.finished_ns, now_ns), gaps.rows)
        scores_of_slot = {row.slot: row.scores for row in done.sampled_scores}
        prompt_scores_of_slot = {row.slot: row for row in done.prompt_scores}
        for placement in flight.decodes:
            placement.num_in_flight -= 1
            placement.num_computed += 1
            if placement.num_computed >= placement.publish_len:
                _publish(placement)
        for chunk, placement in zip(flight.plan.chunks, flight.chunks, strict=True):
            placement.num_in_flight -= 1
            placement.num_computed = chunk.start + chunk.num_tokens
            if placement.num_computed >= placement.publish_len:
                _publish(placement)
            scored = prompt_scores_of_slot.get(chunk.slot)
            if scored is not None and not placement.request.has_ended:
                self._scored(placement.request, scored)
        for placement in flight.placements:
            if placement.request.has_ended and placement.num_in_flight == 0:
                self._release(placement.request)
        token_of_slot = dict(zip(done.slots, done.token_ids, strict=True))
        self._pass_on(flight.sampled, gaps, token_of_slot, scores_of_slot, now_ns)

    def _scored(self, request: Request, scored: SlotScores) -> None:
        arrived = request.arrived
        request.num_scored = scored.first_index + scored.scores.num_tokens
        self._outboxes.of(arrived.tokenizer_id).scored.append(
            PromptScored(arrived.request_id, arrived.attempt, scored.first_index, scored.scores)
        )

    def _pass_on(
        self,
        sampled: list[Placement],
        gaps: Gaps,
        token_of_slot: dict[Slot, int],
        scores_of_slot: dict[Slot, TokenScores],
        now_ns: int,
    ) -> None:
        """Tell of the tokens that a result brought; end requests whose last it was."""
        tokenizer_id: TokenizerId | None = None
        told: list[TokensSampled] = []
        # The first row is of all who had a token in the result before this one; there is none without decodes.
        before = gaps.before if gaps.rows else gaps.latest
        for placement in sampled:
            request = placement.request
            if request.has_ended:
                continue
            arrived, token_ids, token_id = request.arrived, request.token_ids, token_of_slot[placement.slot]
            if arrived.tokenizer_id != tokenizer_id:
                tokenizer_id = arrived.tokenizer_id
                told = self._outboxes.of(tokenizer_id).sampled
            first_index = len(token_ids) - arrived.num_prompt_tokens
            gap = 0 if placement.tally is before else gaps.index_of(placement)
            placement.tally = gaps.latest
            told.append(
                TokensSampled(
                    arrived.request_id,
                    arrived.attempt,
                    first_index,
                    (token_id,),
                    request.num_cached_tokens,
                    gap,
                    scores_of_slot.get(placement.slot),
                )
            )
            token_ids.append(token_id)
            if token_id in placement.stop_ids:
                self._end(request, FinishReason.STOP, now_ns, stop=token_id)
            elif len(token_ids) >= request.max_len:
                self._end(request, FinishReason.LENGTH, now_ns)

    def _open_epoch(self, worker: Worker, refused: PlanRefused, now_ns: int) -> None:
        """The worker could not apply a plan: nothing in flight counts, and it is told everything again.

        What it holds in its KV cache up to the last result stands, since plans run one after another.
        """
        worker.num_refusals += 1
        if worker.num_refusals > self._limits.max_refusals:
            self._dismiss(worker, f"it refused {worker.num_refusals} plans in a row: {refused.detail}", now_ns)
            return
        ended: dict[int, Request] = {}
        for flight in worker.in_flight:
            for placement in flight.placements:
                placement.num_in_flight = 0
                placement.is_introduced = False
                if placement.request.has_ended:
                    ended[placement.request.order] = placement.request
        worker.in_flight.clear()
        worker.epoch += 1
        worker.next_iteration = 0
        worker.released.clear()
        for request in ended.values():
            self._release(request)
        worker.released.clear()  # The new epoch begins without slots.
        for request in worker.running:
            placement = request.placed
            placement.is_introduced = False
            placement.num_planned = placement.num_computed
            placement.prefill_len = len(request.token_ids)
            placement.last_flight = None

    # --- plans ------------------------------------------------------------------------------------------------------

    def _plan_workers(self, now_ns: int) -> None:
        for worker in self._workers.values():
            # Stages of a pipeline hold a plan each; what depth adds to one is ahead of the first stage.
            while len(worker.in_flight) < self._limits.depth + worker.num_stages - 1:
                plan = self._planner.plan(worker, now_ns)
                giving_way = self._planner.giving_way
                if giving_way.preempted:
                    self._told += giving_way.preempted
                    giving_way.preempted = []
                if plan is None:
                    break
                self._plans.append(plan)
                self._note_due(worker.in_flight[0].timeout_ns)
        if self._waiting and len(self._workers) > 1:
            # What waits for one of them begins on another when it turns silent, though nothing else may happen by then.
            for worker in self._workers.values():
                if now_ns < worker.silent_from_ns < inf:
                    self._note_due(int(worker.silent_from_ns) + 1)

    # --- what must be looked at later -------------------------------------------------------------------------------

    def _ask_to_be_woken(self) -> None:
        due_ns = self._new_due_ns
        if due_ns is not None and (self._wake_due_ns is None or due_ns < self._wake_due_ns):
            self._wake_due_ns = due_ns
            self._told.append(WakeAt(due_ns=due_ns))

    def _note_due(self, due_ns: int) -> None:
        """Something must be looked at by then, if it is still there."""
        if self._new_due_ns is None or due_ns < self._new_due_ns:
            self._new_due_ns = due_ns


def _publish(placement: Placement) -> None:
    """Let others find the blocks that a result filled."""
    pool, request = placement.worker.pool, placement.request
    # The last token's KV may be there before the token is known, where the request has ended meanwhile.
    first, end = placement.num_published, min(placement.num_computed, len(request.token_ids)) // pool.block_size
    hashes = request.hashes.first(end, request.token_ids, pool.block_size)
    pool.publish(placement.block_table[first:end], hashes[first:end])
    placement.num_published = end
    placement.publish_len = (end + 1) * pool.block_size
