"""The truth of every stream: what was asked, every token delivered so far, and how it ended. No clock, no socket.

The core acts on the next token index it expects and nothing else. Rows of older attempts, of other peers than the one
a call was given to, and of requests that have ended are dropped; tokens seen before are skipped; a missing token means
that the link lost something, and the link is dropped with everything on it.
"""

from dataclasses import dataclass

from common.ids import RequestId
from common.messages import TextBatch
from common.messages.gaps import WorkerGap
from common.messages.logprobs import TokenLogprob
from common.messages.requests import (
    FinishReason,
    PromptDelta,
    RequestEnded,
    RequestQueued,
    RequestRejected,
    TextDelta,
)
from services.gateway.calls import Call, PeerKey, Phase, Stream
from services.gateway.errors import ApiError, internal_error, rejection, unavailable

LOGPROB_BYTES = 100
"""What one scored token, or one of its alternatives, takes of an answer, more or less."""


@dataclass(frozen=True, slots=True)
class CallChanged:
    """Something has happened to the call: its handler should look."""

    call: Call


@dataclass(frozen=True, slots=True)
class CancelRequests:
    """Tell the peer that nobody waits for these any more."""

    peer: PeerKey
    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class DropPeer:
    """The link lost something; end it."""

    peer: PeerKey
    detail: str


@dataclass(frozen=True, slots=True)
class CutClient:
    """The client does not read what it asked for; close its connection."""

    call: Call


Effect = CallChanged | CancelRequests | DropPeer | CutClient


class StreamCore:
    """All open calls of this gateway."""

    def __init__(self, *, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s
        self._streams: dict[RequestId, Stream] = {}  # those without a terminal
        self._num_open: dict[PeerKey, int] = {}

    @property
    def num_open(self) -> int:
        """Requests without a terminal, over all peers."""
        return len(self._streams)

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether the request is open: submitted, and without a terminal."""
        return request_id in self._streams

    def open_streams(self) -> list[Stream]:
        """Streams without a terminal; for showing."""
        return list(self._streams.values())

    def num_open_at(self, peer: PeerKey) -> int:
        return self._num_open.get(peer, 0)

    def open(self, call: Call, peer: PeerKey) -> None:
        """The call's requests have been sent to peer."""
        call.peer = peer
        for stream in call.streams:
            self._streams[stream.request_id] = stream
        self._num_open[peer] = self.num_open_at(peer) + len(call.streams)

    def apply(self, peer: PeerKey, batch: TextBatch, now_ns: int) -> list[Effect]:
        """Take in what a tokenizer sent."""
        effects: list[Effect] = []
        for row in (*batch.queued, *batch.prompts, *batch.deltas, *batch.ended):
            stream = self._streams.get(row.request_id)
            if stream is None or stream.call.peer is not peer or row.attempt < stream.attempt:
                continue
            stream.call.heard_ns = now_ns
            if fault := self._apply_row(stream, row, batch.gaps, now_ns, effects):
                # Nothing after this row can be trusted to be complete; the peer's loss ends what is open on it.
                effects.append(DropPeer(peer, fault))
                break
        return effects

    def lose(self, peer: PeerKey, detail: str) -> list[Effect]:
        """The connection to peer has ended: so have all calls that were given to it."""
        lost = {stream.call for stream in self._streams.values() if stream.call.peer is peer}
        effects: list[Effect] = []
        for call in sorted(lost, key=lambda call: call.call_id):
            error = unavailable("the tokenizer that served this request was lost", self._retry_after_s)
            effects += [effect for effect in self.fail(call, error) if not isinstance(effect, CancelRequests)]
        self._num_open.pop(peer, None)
        return effects

    def fail(self, call: Call, error: ApiError) -> list[Effect]:
        """End the call with an error, unless it is over."""
        if call.is_over:
            return []
        effects = self.close(call)
        call.failure = error
        return [*effects, CallChanged(call)]

    def close(self, call: Call) -> list[Effect]:
        """Forget the call: its client is gone or answered. What still runs of it is cancelled, all at once."""
        open_ids = tuple(stream.request_id for stream in call.streams if stream.request_id in self._streams)
        for request_id in open_ids:
            self._forget(self._streams[request_id])
        return [CancelRequests(call.peer, open_ids)] if open_ids else []

    def _apply_row(
        self,
        stream: Stream,
        row: RequestQueued | PromptDelta | TextDelta | RequestEnded | RequestRejected,
        gaps: tuple[WorkerGap, ...],
        now_ns: int,
        effects: list[Effect],
    ) -> str:
        """Take in one row of a stream that is open; return what is wrong with the link, or nothing."""
        if row.attempt > stream.attempt:
            return f"{row.request_id}: attempt {row.attempt} of a request that has had {stream.attempt}"
        match row:
            case RequestQueued():
                if stream.phase is Phase.SUBMITTED:
                    stream.num_prompt_tokens = row.num_prompt_tokens
                    self._reach(stream, Phase.QUEUED, effects)
                return ""
            case PromptDelta():
                return self._apply_prompt(stream, row, effects)
            case TextDelta():
                return self._apply_delta(stream, row, gaps, now_ns, effects)
            case RequestEnded():
                return self._apply_end(stream, row, effects)
            case RequestRejected():
                self._forget(stream)
                effects += self.fail(stream.call, rejection(row, self._retry_after_s))
                return ""

    def _apply_delta(
        self,
        stream: Stream,
        delta: TextDelta,
        gaps: tuple[WorkerGap, ...],
        now_ns: int,
        effects: list[Effect],
    ) -> str:
        num_tokens = len(stream.token_ids)
        if delta.first_index > num_tokens:
            return f"{delta.request_id}: token {num_tokens} is missing; {delta.first_index} came"
        if delta.text_offset > stream.text_len:
            return f"{delta.request_id}: character {stream.text_len} is missing; {delta.text_offset} came"
        # What overlaps is known already. Ids and text overlap by their own counts: text may lag behind its tokens.
        token_ids = delta.token_ids[num_tokens - delta.first_index :]
        text = delta.text[stream.text_len - delta.text_offset :]
        if not token_ids and not text:
            return ""
        call = stream.call
        gap = gaps[delta.gap] if 0 <= delta.gap < len(gaps) and delta.first_index == num_tokens else None
        logprobs = delta.logprobs[num_tokens - delta.first_index :]
        stream.add(token_ids, text, delta.stamps, gap, call.blocked_ns(now_ns), logprobs)
        self._reach(stream, Phase.RUNNING, effects)
        self._count_unsent(call, text, logprobs, effects)
        return ""

    def _apply_prompt(self, stream: Stream, delta: PromptDelta, effects: list[Effect]) -> str:
        num_known = stream.num_prompt_logprobs
        if delta.first_index > num_known:
            return f"{delta.request_id}: prompt token {num_known} is missing; {delta.first_index} came"
        text = "" if stream.has_prompt_text else delta.text
        logprobs = delta.logprobs[num_known - delta.first_index :]
        if text or logprobs:
            stream.add_prompt(text, logprobs)
            # Not counted among what waits for the client: it comes at once, and the request itself bounds it.
            self._reach(stream, max(stream.phase, Phase.QUEUED), effects)
        return ""

    def _count_unsent(self, call: Call, text: str, logprobs: tuple[TokenLogprob, ...], effects: list[Effect]) -> None:
        """Count what waits for a client that reads a stream, and end the call when that is too much."""
        if call.max_unsent_bytes is None or not (text or logprobs):
            return
        call.unsent_bytes += len(text) if text.isascii() else len(text.encode())
        call.unsent_bytes += LOGPROB_BYTES * sum([1 + len(token.top) for token in logprobs])
        if call.unsent_bytes > call.max_unsent_bytes:
            error = unavailable(f"{call.unsent_bytes} bytes wait for a client that does not read them", 1)
            effects += (*self.fail(call, error), CutClient(call))

    def _apply_end(self, stream: Stream, ended: RequestEnded, effects: list[Effect]) -> str:
        if ended.num_output_tokens > len(stream.token_ids):
            return f"{ended.request_id}: ended after {ended.num_output_tokens} tokens; {len(stream.token_ids)} came"
        stream.num_prompt_tokens = ended.num_prompt_tokens
        stream.ended = ended
        self._forget(stream)
        if ended.reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            # Cancelled by whom? Not by this gateway, which forgets what it cancels.
            detail = ended.detail or "the request was cancelled inside the server"
            effects += self.fail(stream.call, internal_error(detail))
            return ""
        stream.call.num_running -= 1
        self._reach(stream, Phase.ENDED, effects)
        return ""

    def _reach(self, stream: Stream, phase: Phase, effects: list[Effect]) -> None:
        """The stream is in this phase, and its handler has something new to look at."""
        call = stream.call
        if stream.phase is Phase.SUBMITTED:
            call.num_unqueued -= 1
        stream.phase = phase
        # A handler that has not taken the last token yet need not be told of the next one.
        if not stream.is_fresh or phase is not Phase.RUNNING:
            effects.append(CallChanged(call))
        if not stream.is_fresh:
            stream.is_fresh = True
            call.fresh.append(stream)

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.request_id]
        peer = stream.call.peer
        self._num_open[peer] = num_open = self._num_open[peer] - 1
        if num_open == 0:
            del self._num_open[peer]
