"""What the gateway knows of its open calls: each stream's tokens, and what its handler has not taken yet. No clock."""

from array import array
from dataclasses import dataclass
from enum import IntEnum

from common.ids import RequestId
from common.messages import Submit
from common.messages.gaps import WorkerGap
from common.messages.logprobs import TokenLogprob
from common.messages.requests import RequestEnded, Stamps
from services.gateway.account import Stall, StreamAccount
from services.gateway.errors import ApiError

NO_TARGET_NS = 1 << 62
"""Of a call that nobody watches: no gap is above it."""

PeerKey = object
"""Stands for one connection to one tokenizer; compared by identity."""


class Phase(IntEnum):
    SUBMITTED = 0  # no word of it yet
    QUEUED = 1
    RUNNING = 2  # it has a token
    ENDED = 3


class Stream:
    """One choice of one prompt: one request."""

    __slots__ = (
        *("attempt", "call", "ended", "first_token_ns", "index", "last_gap_ns", "last_token_ns", "num_fresh_tokens"),
        *("num_prompt_tokens", "phase", "prompt_index", "request_id", "tbt_max_ns", "text_len", "token_ids"),
        *("_account", "_fresh_text", "_has_late_token", "_has_text", "_last_text_ns", "held_text_ns", "is_fresh"),
        *("num_stalls", "stall"),
        *("_fresh_logprobs", "has_prompt_text", "num_prompt_logprobs"),
    )

    def __init__(self, call: "Call", request_id: RequestId, index: int, prompt_index: int, attempt: int) -> None:
        self.call = call
        self.request_id = request_id
        self.index = index  # OpenAI's choice index
        self.prompt_index = prompt_index
        self.attempt = attempt
        self.phase = Phase.SUBMITTED
        # Kept to the end, with the call's submits: whoever places the request again needs both.
        self.token_ids = array("i")
        self.text_len = 0  # characters of output text that have arrived
        self.num_prompt_tokens = 0
        self.ended: RequestEnded | None = None
        self.is_fresh = False  # whether call.fresh holds it
        self.num_fresh_tokens = 0  # arrived and not yet marked
        self._fresh_text: list[str] = []
        self._fresh_logprobs: list[TokenLogprob] = []
        self.has_prompt_text = False  # of an echoed prompt; it comes at once
        self.num_prompt_logprobs = 0  # tokens of it that have come
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.tbt_max_ns = 0
        self.last_gap_ns = 0
        self.num_stalls = 0
        self.stall: Stall | None = None  # that the last mark found
        self.held_text_ns = 0  # between texts whose tokens were all in time, that the last mark found above the target
        self._account = StreamAccount()
        self._has_text = False  # among what has not been marked
        self._has_late_token = False  # since text last left
        self._last_text_ns = 0  # when that was

    def take_text(self) -> str:
        """The text that has arrived since the last call."""
        match self._fresh_text:
            case []:
                return ""
            case [text]:
                pass
            case _:
                text = "".join(self._fresh_text)
        self._fresh_text.clear()
        return text

    def take_logprobs(self) -> list[TokenLogprob]:
        """The scored tokens that have arrived since the last call."""
        fresh, self._fresh_logprobs = self._fresh_logprobs, []
        return fresh

    def add_prompt(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Append what is new of an echoed prompt, before any output."""
        self.num_prompt_logprobs += len(logprobs)
        self._fresh_logprobs += logprobs
        if text:
            self.has_prompt_text = True
            self._fresh_text.append(text)

    def add(
        self,
        token_ids: tuple[int, ...],
        text: str,
        stamps: Stamps,
        gap: WorkerGap | None = None,
        blocked_ns: int = 0,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """Append what is new. StreamAccount.came says what belongs to the tokens."""
        if logprobs:
            self._fresh_logprobs += logprobs
        if token_ids:
            self.token_ids.extend(token_ids)
            self.num_fresh_tokens += len(token_ids)
            self._account.came(stamps, gap, blocked_ns)
        if text:
            self.text_len += len(text)
            self._fresh_text.append(text)
            self._has_text = True

    def mark(self, now_ns: int, blocked_ns: int = 0) -> int | None:
        """The fresh tokens left at now_ns: return the gap before them, or None for the first ones or no tokens. If the
        gap is above the target, stall has its account until the next mark.

        blocked_ns is for how long, all told, the connection has been full by now.
        """
        if self.num_fresh_tokens == 0:
            return None
        self.stall, self.held_text_ns = None, 0
        gap_ns = None
        if self.first_token_ns:
            self.last_gap_ns = gap_ns = now_ns - self.last_token_ns
            self.tbt_max_ns = max(self.tbt_max_ns, gap_ns)
            if gap_ns > self.call.tbt_target_ns:
                self._note_stall(gap_ns, now_ns, blocked_ns)
        else:
            self.first_token_ns = now_ns
        self._account.left(blocked_ns)
        self.last_token_ns = now_ns
        self.num_fresh_tokens = 0
        if self._has_text:
            self._mark_text(now_ns)
        return gap_ns

    def _note_stall(self, gap_ns: int, now_ns: int, blocked_ns: int) -> None:
        account, stamps = self._account.close(gap_ns, blocked_ns)
        self.num_stalls += 1
        self._has_late_token = True
        self.stall = Stall(
            request_id=self.request_id,
            index=len(self.token_ids) - self.num_fresh_tokens,
            at_ns=now_ns,
            gap_ns=gap_ns,
            target_ns=self.call.tbt_target_ns,
            stamps=stamps,
            account=account,
        )

    def _mark_text(self, now_ns: int) -> None:
        """Text left, too: tokens may have come in time for longer than the target without giving any."""
        if self._last_text_ns and not self._has_late_token:
            text_gap_ns = now_ns - self._last_text_ns
            if text_gap_ns > self.call.tbt_target_ns:
                self.held_text_ns = text_gap_ns
        self._last_text_ns = now_ns
        self._has_text = self._has_late_token = False

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) if self.ended is None else self.ended.num_output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """What a call used."""

    num_prompt_tokens: int  # each prompt once, however many choices it has
    num_output_tokens: int
    num_cached_tokens: int


class Call:
    """One HTTP call: its prompts as sent, its streams, and what its handler has not taken yet."""

    def __init__(
        self,
        call_id: str,
        submits: tuple[Submit, ...],
        *,
        arrived_ns: int,
        max_unsent_bytes: int | None,
        tbt_target_ns: int = NO_TARGET_NS,
    ) -> None:
        """max_unsent_bytes bounds the text that waits for a slow client; None where the answer is sent as a whole.
        A gap above tbt_target_ns is a stall."""
        self.call_id = call_id
        self.submits = submits
        self.arrived_ns = arrived_ns
        self.heard_ns = arrived_ns  # when the ring last said something of it
        self.peer: PeerKey | None = None
        choices = [(n, submit, choice) for n, submit in enumerate(submits) for choice in submit.choices]
        self.streams = [
            Stream(self, choice.request_id, index, prompt_index, submit.attempt)
            for index, (prompt_index, submit, choice) in enumerate(choices)
        ]
        self.fresh: list[Stream] = []
        self.failure: ApiError | None = None
        self.num_running = len(self.streams)  # streams without a terminal
        self.num_unqueued = len(self.streams)
        self.unsent_bytes = 0
        self.max_unsent_bytes = max_unsent_bytes
        self.tbt_target_ns = tbt_target_ns
        self.max_kept_stalls = 0  # above 0 where somebody wants to hear of them when the call ends
        self.kept_stalls: list[Stall] = []
        self._blocked_ns = 0  # for how long, all told, the connection has been full
        self._blocked_since_ns = 0  # 0 while it is not

    @property
    def trace_id(self) -> str:
        """Of the trace that the call is part of; empty without one."""
        traceparent = self.submits[0].traceparent
        return traceparent.split("-")[1] if traceparent else ""

    @property
    def is_over(self) -> bool:
        """Whether every stream has ended, or the call failed."""
        return self.failure is not None or self.num_running == 0

    @property
    def is_queued(self) -> bool:
        """Whether the ring has taken every request of the call."""
        return self.num_unqueued == 0

    def block(self, now_ns: int) -> None:
        """The client's connection is full."""
        self._blocked_since_ns = now_ns

    def unblock(self, now_ns: int) -> None:
        """It is no longer."""
        self._blocked_ns = self.blocked_ns(now_ns)
        self._blocked_since_ns = 0

    def blocked_ns(self, now_ns: int) -> int:
        """For how long, all told, the client's connection has been full by now."""
        if self._blocked_since_ns == 0:
            return self._blocked_ns
        return self._blocked_ns + now_ns - self._blocked_since_ns

    def take_fresh(self) -> list[Stream]:
        """The streams of which something has happened since the last call."""
        fresh, self.fresh = self.fresh, []
        for stream in fresh:
            stream.is_fresh = False
        self.unsent_bytes = 0
        return fresh

    def counts(self) -> TokenCounts:
        first_of_prompt = {stream.prompt_index: stream for stream in reversed(self.streams)}.values()
        return TokenCounts(
            num_prompt_tokens=sum(stream.num_prompt_tokens for stream in first_of_prompt),
            num_output_tokens=sum(stream.num_output_tokens for stream in self.streams),
            num_cached_tokens=sum(stream.ended.num_cached_tokens for stream in first_of_prompt if stream.ended),
        )
