"""The tokenizer's decisions: which requests it takes on, whose text goes where, and how each one ends."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from msgspec.structs import replace

from common.ids import RequestId, TokenizerId, pack_ids
from common.messages import (
    CallFailed,
    Cancel,
    Decode,
    Decoded,
    Encode,
    Encoded,
    PoolCard,
    RequestArrived,
    StreamBatch,
    Submit,
)
from common.messages.requests import Choice, FinishReason, RejectReason
from services.tokenizer.events import (
    ArrivalNotSent,
    DropGateway,
    DropJob,
    Effect,
    Event,
    FromGateway,
    FromScheduler,
    GatewayDown,
    GatewayLink,
    GatewayUp,
    JobDone,
    SchedulerDown,
    SchedulerUp,
    StartJob,
    ToGateway,
    ToScheduler,
)
from services.tokenizer.jobs import DecodedText, EncodedIds, Invalid, Job, JobId, JobResult, Prepared, param_of
from services.tokenizer.open_requests import OpenRequests, Outbox, Request
from services.tokenizer.relay import relay
from services.tokenizer.validation import Refusal, check_model, check_parameters, fit, queue_full, unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what one tokenizer takes on."""

    max_open_requests: int
    max_waiting_jobs: int


class TokenizerCore:
    """A deterministic state machine. Never waits, logs, reads a clock or touches a socket.

    A request is open from its Submit until its terminal message. While its prompt is encoded it has no stream, and
    the scheduler knows nothing of it.
    """

    def __init__(self, tokenizer_id: TokenizerId, limits: Limits) -> None:
        self._tokenizer_id = tokenizer_id
        self._limits = limits
        self._gateways: dict[GatewayLink, None] = {}  # a set with an order
        self._requests = OpenRequests()
        self._jobs: dict[JobId, tuple[GatewayLink, Job]] = {}
        self._next_job_id = 0
        self._has_scheduler = False
        self._card: PoolCard | None = None

    @property
    def num_open(self) -> int:
        """Requests whose terminal message is still to come."""
        return len(self._requests)

    @property
    def missing(self) -> str:
        """What keeps requests from running now; empty when nothing does."""
        if not self._has_scheduler:
            return "the scheduler is not connected"
        if self._card is None:
            return "the scheduler has not said which model it serves"
        return "" if self._card.num_workers else "the scheduler has no worker"

    def step(self, event: Event) -> list[Effect]:
        """Apply one event; return, in order, what the world must now be told."""
        match event:
            case FromScheduler(message):
                return relay(message, self._requests) if isinstance(message, StreamBatch) else self._set_card(message)
            case FromGateway(gateway, request):
                return self._from_gateway(gateway, request)
            case JobDone(job_id, result):
                return self._job_done(job_id, result)
            case ArrivalNotSent(request_id, detail):
                return self._reject([request_id], unavailable(detail))
            case GatewayUp(gateway):
                self._gateways[gateway] = None
                return [] if self._card is None else [ToGateway(gateway, self._card)]
            case GatewayDown(gateway):
                return self._lose_gateway(gateway)
            case SchedulerUp():
                self._has_scheduler = True
                return []
            case SchedulerDown(detail):
                return self._lose_scheduler(detail)
            case _:
                assert_never(event)

    def _from_gateway(self, gateway: GatewayLink, message: Submit | Cancel | Encode | Decode) -> list[Effect]:
        match message:
            case Submit():
                return self._submit(gateway, message)
            case Cancel():
                return self._cancel(gateway, message.request_ids)
            case Encode() | Decode():
                return self._call(gateway, message)
            case _:
                assert_never(message)

    def _set_card(self, card: PoolCard) -> list[Effect]:
        self._card = card
        return [ToGateway(gateway, card) for gateway in self._gateways]

    # From a Submit to its RequestArrived.

    def _submit(self, gateway: GatewayLink, submit: Submit) -> list[Effect]:
        ids = [choice.request_id for choice in submit.choices]
        if not ids:
            return []
        older = [request_id for request_id in ids if request_id in self._requests]
        if len(set(ids)) < len(ids) or any(self._requests[i].attempt >= submit.attempt for i in older):
            # Two requests of one name cannot both have their end.
            return [DropGateway(gateway, "it submitted a request that is open already")]
        effects = self._supersede(older)
        for request_id in ids:
            request = Request(gateway=gateway, attempt=submit.attempt, job_id=JobId(self._next_job_id))
            self._requests.open(request_id, request)
        if (refusal := self._refusal_of(submit)) is not None:
            return [*effects, *self._reject(ids, refusal)]
        return [*effects, *self._start_job(gateway, submit)]

    def _supersede(self, request_ids: list[RequestId]) -> list[Effect]:
        """Forget older attempts: the gateway has given them up, on a link whose loss is not yet seen here."""
        to_scheduler = self._tell_scheduler(request_ids)
        job_ids = {self._requests.forget(request_id).job_id for request_id in request_ids}
        return [*to_scheduler, *self._drop_jobs(job_ids)]

    def _refusal_of(self, submit: Submit) -> Refusal | None:
        """Why this Submit, whose requests are open by now, is not worth encoding, if so."""
        if (refusal := check_model(submit.model, self._card)) is not None:
            return refusal
        assert self._card is not None, "check_model refuses what has no pool"
        if (refusal := check_parameters(submit, self._card)) is not None:
            return refusal
        if self.missing:
            return unavailable(self.missing)
        if len(self._requests) > self._limits.max_open_requests:
            num_others = len(self._requests) - len(submit.choices)
            return queue_full(f"{num_others} requests are open here; the most is {self._limits.max_open_requests}")
        return self._job_refusal()

    def _encoded(self, submit: Submit, ids: list[RequestId], prepared: Prepared) -> list[Effect]:
        """Send on the requests named by ids: a Submit's prompt is encoded, and these are still open."""
        if self.missing:
            return self._reject(ids, unavailable(self.missing))
        assert self._card is not None, "missing names a missing card"
        max_tokens = fit(submit, len(prepared.prompt_ids), self._card, param_of(submit))
        if isinstance(max_tokens, Refusal):
            return self._reject(ids, max_tokens)
        outbox, arrivals = Outbox(), list[Effect]()
        for choice in submit.choices:
            if choice.request_id not in ids:
                continue
            request = self._requests[choice.request_id]
            request.stream = prepared.choices[choice.request_id].stream
            request.num_prompt_tokens = len(prepared.prompt_ids)
            request.echo, request.token_bytes = prepared.echo, prepared.token_bytes
            reason, stop = self._earlier_end(submit, choice, prepared, max_tokens)
            if reason is not None:
                # All output was delivered by an earlier attempt, whose terminal message was lost.
                self._requests.end(choice.request_id, reason, outbox, stop=stop)
            else:
                arrivals.append(ToScheduler(self._arrival(submit, choice, prepared, max_tokens)))
        return [*arrivals, *outbox.batches()]

    def _earlier_end(
        self, submit: Submit, choice: Choice, prepared: Prepared, max_tokens: int
    ) -> tuple[FinishReason | None, str | int | None]:
        """How the request ended with what an earlier attempt delivered, if it did, and its stop string or id."""
        resumed = prepared.choices[choice.request_id]
        if resumed.stream.stop is not None:
            return FinishReason.STOP, resumed.stream.stop
        assert self._card is not None, "a request is prepared for a pool"
        eos_ids = () if submit.sampling.ignore_eos else self._card.model.eos_token_ids
        last_id = resumed.output_ids[-1] if resumed.output_ids else None
        if last_id is not None and last_id in (*eos_ids, *submit.sampling.stop_token_ids):
            return FinishReason.STOP, last_id
        return (FinishReason.LENGTH if len(resumed.output_ids) >= max_tokens else None), None

    def _arrival(self, submit: Submit, choice: Choice, prepared: Prepared, max_tokens: int) -> RequestArrived:
        known_ids = array("i", prepared.prompt_ids)
        known_ids.extend(prepared.choices[choice.request_id].output_ids)
        return RequestArrived(
            request_id=choice.request_id,
            tokenizer_id=self._tokenizer_id,
            attempt=submit.attempt,
            token_ids=pack_ids(known_ids),
            num_prompt_tokens=len(prepared.prompt_ids),
            max_tokens=max_tokens,
            seed=choice.seed,
            sampling=submit.sampling,
            priority=submit.priority,
            tbt_target_ms=submit.tbt_target_ms,
            ttft_target_ms=submit.ttft_target_ms,
            deadline_ms=submit.deadline_ms,
            cache_salt=submit.cache_salt,
            traceparent=submit.traceparent,
            tracestate=submit.tracestate,
        )

    # Ends before their time.

    def _reject(self, request_ids: Iterable[RequestId], refusal: Refusal) -> list[Effect]:
        outbox = Outbox()
        self._requests.reject(request_ids, refusal, outbox)
        return outbox.batches()

    def _cancel(self, gateway: GatewayLink, request_ids: Iterable[RequestId]) -> list[Effect]:
        """End requests whose client has gone, in whichever phase they are."""
        own = [
            request_id
            for request_id in dict.fromkeys(request_ids)
            if (request := self._requests.get(request_id)) is not None and request.gateway == gateway
        ]
        to_scheduler = self._tell_scheduler(own)
        outbox, job_ids = Outbox(), {self._requests[request_id].job_id for request_id in own}
        for request_id in own:
            self._requests.end(request_id, FinishReason.CANCELLED, outbox)
        return [*to_scheduler, *self._drop_jobs(job_ids), *outbox.batches()]

    def _lose_gateway(self, gateway: GatewayLink) -> list[Effect]:
        own = self._requests.ids_of(gateway)
        to_scheduler = self._tell_scheduler(own)
        for request_id in own:
            self._requests.forget(request_id)
        del self._gateways[gateway]
        job_ids = {job_id for job_id, (owner, _) in self._jobs.items() if owner == gateway}
        return [*to_scheduler, *self._drop_jobs(job_ids)]

    def _lose_scheduler(self, detail: str) -> list[Effect]:
        """End every request; gateways hear that nothing can run until a scheduler says otherwise."""
        self._has_scheduler = False
        lost = f"the scheduler was lost: {detail}"
        outbox, job_ids = Outbox(), set[JobId]()
        for request_id in self._requests.ids():
            request = self._requests[request_id]
            job_ids.add(request.job_id)
            if request.num_output_tokens:
                self._requests.end(request_id, FinishReason.ERROR, outbox, detail=lost)
            else:
                self._requests.reject([request_id], unavailable(lost), outbox)
        effects = [*outbox.batches(), *self._drop_jobs(job_ids)]
        if self._card is not None:
            effects += self._set_card(replace(self._card, num_workers=0))
        return effects

    def _tell_scheduler(self, request_ids: Iterable[RequestId]) -> list[Effect]:
        """One Cancel for those of the requests that the scheduler knows."""
        known = tuple(request_id for request_id in request_ids if self._requests[request_id].stream is not None)
        return [ToScheduler(Cancel(request_ids=known))] if known else []

    # Calls and jobs.

    def _call(self, gateway: GatewayLink, call: Encode | Decode) -> list[Effect]:
        refusal = check_model(call.model, self._card) or self._job_refusal()
        if refusal is None:
            return self._start_job(gateway, call)
        failed = CallFailed(call_id=call.call_id, reason=refusal.reason, detail=refusal.detail, param=refusal.param)
        return [ToGateway(gateway, failed)]

    def _job_refusal(self) -> Refusal | None:
        if len(self._jobs) < self._limits.max_waiting_jobs:
            return None
        return queue_full(f"{len(self._jobs)} prompts wait to be encoded; the most is {self._limits.max_waiting_jobs}")

    def _start_job(self, gateway: GatewayLink, message: Submit | Encode | Decode) -> list[Effect]:
        assert self._card is not None, "check_model refuses what has no pool"
        job = Job(
            job_id=JobId(self._next_job_id),
            message=message,
            vocab_size=self._card.model.vocab_size,
            max_model_len=self._card.model.max_model_len,
            eos_token_ids=self._card.model.eos_token_ids,
        )
        self._next_job_id += 1
        self._jobs[job.job_id] = (gateway, job)
        return [StartJob(job)]

    def _drop_jobs(self, job_ids: set[JobId]) -> list[Effect]:
        """Drop those of the jobs that still run and that no other choice of their Submit waits for."""
        running = job_ids & self._jobs.keys()
        if running:
            running -= {self._requests[request_id].job_id for request_id in self._requests.ids()}
        return [DropJob(job_id) for job_id in sorted(running)]

    def _job_done(self, job_id: JobId, result: JobResult | None) -> list[Effect]:
        gateway, job = self._jobs.pop(job_id)
        if result is None or gateway not in self._gateways:
            return []
        if not isinstance(job.message, Submit):
            return [ToGateway(gateway, _answer(job, job.message, result))]
        ids = [
            choice.request_id
            for choice in job.message.choices
            if (request := self._requests.get(choice.request_id)) is not None and request.job_id == job_id
        ]
        match result:
            case Prepared() if ids:
                return self._encoded(job.message, ids, result)
            case Invalid(detail, param):
                return self._reject(ids, Refusal(RejectReason.INVALID, detail, param))
        return []  # All of its requests were cancelled meanwhile.


def _answer(job: Job, call: Encode | Decode, result: JobResult) -> Encoded | Decoded | CallFailed:
    match result:
        case EncodedIds(packed=packed):
            return Encoded(call_id=call.call_id, token_ids=packed, max_model_len=job.max_model_len)
        case DecodedText(text):
            return Decoded(call_id=call.call_id, text=text)
        case Invalid(detail, param):
            return CallFailed(call_id=call.call_id, reason=RejectReason.INVALID, detail=detail, param=param)
        case Prepared():
            raise AssertionError("a call's job came back with a Submit's result")
