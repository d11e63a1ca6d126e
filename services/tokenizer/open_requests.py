"""The requests that are open on one tokenizer, and the messages that end them: each exactly once."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from common.ids import InstanceId, RequestId, WorkerId
from common.messages import TextBatch
from common.messages.gaps import WorkerGap
from common.messages.requests import (
    FinishReason,
    PromptDelta,
    RequestEnded,
    RequestQueued,
    RequestRejected,
    Stamps,
    TextDelta,
)
from services.tokenizer.events import Effect, GatewayLink, ToGateway
from services.tokenizer.jobs import JobId
from services.tokenizer.text.echo import Echo
from services.tokenizer.text.stream import TextStream
from services.tokenizer.validation import Refusal

NO_STAMPS = Stamps(worker_id=WorkerId(InstanceId("")), iteration=0, worker_ns=0)
"""Of text that no new token completed."""

_FLUSHED = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends after which no token follows. After any other, held-back text stays back: whoever continues the request from
its tokens gets it then, and nobody gets it twice."""


@dataclass(slots=True)
class Request:
    """One choice, from its Submit until its terminal message."""

    gateway: GatewayLink
    attempt: int
    job_id: JobId  # the encoding of its prompt
    stream: TextStream | None = None  # none until its prompt is encoded; then the scheduler knows of it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # as the scheduler said with its latest tokens
    echo: Echo | None = None
    num_scored: int = 1  # prompt tokens whose scores have come, or need none: nothing precedes the first
    token_bytes: list[bytes] | None = None  # of each token id, where its tokens are scored

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.stream is None else self.stream.num_tokens


class Outbox:
    """What one event makes of text and ends, gathered into one batch a gateway."""

    def __init__(self, gaps: tuple[WorkerGap, ...] = ()) -> None:
        """gaps are what the deltas' indices mean."""
        self._gaps = gaps
        self._queued: dict[GatewayLink, list[RequestQueued]] = defaultdict(list)
        self._prompts: dict[GatewayLink, list[PromptDelta]] = defaultdict(list)
        self._deltas: dict[GatewayLink, list[TextDelta]] = defaultdict(list)
        self._ended: dict[GatewayLink, list[RequestEnded | RequestRejected]] = defaultdict(list)

    def queued(self, gateway: GatewayLink, queued: RequestQueued) -> None:
        self._queued[gateway].append(queued)

    def prompt(self, gateway: GatewayLink, prompt: PromptDelta) -> None:
        self._prompts[gateway].append(prompt)

    def delta(self, gateway: GatewayLink, delta: TextDelta) -> None:
        self._deltas[gateway].append(delta)

    def ended(self, gateway: GatewayLink, ended: RequestEnded | RequestRejected) -> None:
        self._ended[gateway].append(ended)

    def batches(self) -> list[Effect]:
        """Return one batch for each gateway that has something."""
        gateways = dict.fromkeys((*self._queued, *self._prompts, *self._deltas, *self._ended))  # A set with an order.
        return [ToGateway(gateway, self._batch(gateway)) for gateway in gateways]

    def _batch(self, gateway: GatewayLink) -> TextBatch:
        deltas = tuple(self._deltas.get(gateway, ()))
        return TextBatch(
            queued=tuple(self._queued.get(gateway, ())),
            prompts=tuple(self._prompts.get(gateway, ())),
            deltas=deltas,
            gaps=self._gaps if deltas else (),
            ended=tuple(self._ended.get(gateway, ())),
        )


class OpenRequests:
    """Requests by id and by gateway. The three ways out of it (end, reject, pass_on) put a terminal message into an
    outbox; forget is for requests whose gateway is gone."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, Request] = {}
        self._ids_of: dict[GatewayLink, dict[RequestId, None]] = defaultdict(dict)  # in order of arrival

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: RequestId) -> Request:
        return self._by_id[request_id]

    def get(self, request_id: RequestId) -> Request | None:
        return self._by_id.get(request_id)

    def ids(self) -> list[RequestId]:
        return list(self._by_id)

    def ids_of(self, gateway: GatewayLink) -> list[RequestId]:
        return list(self._ids_of.get(gateway, ()))

    def open(self, request_id: RequestId, request: Request) -> None:
        assert request_id not in self._by_id, "a request is opened once"
        self._by_id[request_id] = request
        self._ids_of[request.gateway][request_id] = None

    def forget(self, request_id: RequestId) -> Request:
        """Take a request out without a word."""
        request = self._by_id.pop(request_id)
        ids = self._ids_of[request.gateway]
        del ids[request_id]
        if not ids:
            del self._ids_of[request.gateway]
        return request

    def end(
        self,
        request_id: RequestId,
        reason: FinishReason,
        outbox: Outbox,
        *,
        stop: str | int | None = None,
        detail: str = "",
        told: RequestEnded | RequestRejected | None = None,
    ) -> None:
        """End a request by the tokenizer's own decision. told is the scheduler's word on it, where there is one."""
        request = self.forget(request_id)
        if reason in _FLUSHED:
            _flush(request_id, request, NO_STAMPS, outbox)
        known = told if isinstance(told, RequestEnded) else None
        ended = RequestEnded(
            request_id=request_id,
            attempt=request.attempt,
            reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens if known is None else known.num_cached_tokens,
            num_preemptions=0 if known is None else known.num_preemptions,
            stop=stop,
            detail=detail,
        )
        outbox.ended(request.gateway, ended)

    def reject(self, request_ids: Iterable[RequestId], refusal: Refusal, outbox: Outbox) -> None:
        """End requests that never ran; ids that are not open are ignored."""
        for request_id in request_ids:
            if request_id not in self._by_id:
                continue
            request = self.forget(request_id)
            rejected = RequestRejected(
                request_id=request_id,
                attempt=request.attempt,
                reason=refusal.reason,
                detail=refusal.detail,
                param=refusal.param,
                retry_after_s=refusal.retry_after_s,
            )
            outbox.ended(request.gateway, rejected)

    def pass_on(self, ended: RequestEnded | RequestRejected, stamps: Stamps, outbox: Outbox) -> None:
        """End a request as the scheduler says, after its held-back text; which may, at last, be a stop string."""
        request = self._by_id[ended.request_id]
        if isinstance(ended, RequestEnded) and ended.reason in _FLUSHED:
            _flush(ended.request_id, request, stamps, outbox)
            if request.stream is not None and request.stream.stop is not None:
                self.end(ended.request_id, FinishReason.STOP, outbox, stop=request.stream.stop, told=ended)
                return
        self.forget(ended.request_id)
        outbox.ended(request.gateway, ended)


def _flush(request_id: RequestId, request: Request, stamps: Stamps, outbox: Outbox) -> None:
    """Send what the stream has held back: no token follows."""
    if (stream := request.stream) is None:
        return
    text_offset = stream.num_chars
    if text := stream.finish():
        delta = TextDelta(
            request_id=request_id,
            attempt=request.attempt,
            first_index=stream.num_tokens,
            token_ids=(),
            text_offset=text_offset,
            text=text,
            stamps=stamps,
        )
        outbox.delta(request.gateway, delta)
