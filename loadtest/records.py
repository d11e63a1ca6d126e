"""What came of one request: when it should have been sent, when it was, and when each piece of its answer arrived.

A *chunk* is an event that brought something; a *token* is a token. Most servers send one token per chunk, but not all
and not always, so the two kinds of gap are kept apart:

- A chunk gap lies between neighbouring chunks. It is always known.
- A token gap lies between neighbouring tokens. Tokens of one chunk arrive at one instant, so of a stream of T tokens
  in C chunks the token gaps are its C - 1 chunk gaps and T - C zeros, wherever in the chunks the tokens lie. They are
  known when T is: from token ids, or from the usage at the end.

Both have the same largest value, and the same number above a target: only their percentiles differ.
"""

from array import array
from dataclasses import dataclass, field

CUT = "cut"
"""The generator itself ended the request, at the end of a run: no failure of the server."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request of a run. Times are this machine's monotonic clock, in nanoseconds; 0 where it never came to it."""

    index: int  # in the run, from 0; the turns of a conversation share it
    turn: int = 0
    class_name: str = ""
    is_measured: bool = True  # False for load that only surrounds the measured window
    prompt_len: int = 0  # tokens asked for
    output_len: int = 0

    scheduled_ns: int = 0  # when an ideal generator would have sent it
    started_ns: int = 0  # when this one took it up
    sent_ns: int = 0  # connected, and written to the socket
    ended_ns: int = 0

    chunk_ns: "array[int]" = field(default_factory=lambda: array("q"))  # each chunk's socket read
    silent_ns: "array[int]" = field(default_factory=lambda: array("q"))  # events that brought no text and no ids
    num_ids: int = 0  # token ids received, where the server sends them
    num_prompt_tokens: int | None = None  # as the server counts
    num_output_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""  # kind; empty when all is well

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def is_failed(self) -> bool:
        return bool(self.error) and self.error != CUT

    @property
    def num_tokens(self) -> int | None:
        """Output tokens that arrived, or None if the server told neither ids nor usage."""
        return self.num_ids or self.num_output_tokens

    def settle(self) -> None:
        """Call at the end: decide whether events without text were tokens.

        Half a character has no text yet, and an end-of-sequence token never has, but their events mark a token's
        arrival all the same. They count when the server's usage says so: exactly as many tokens as it has events.
        """
        if self.num_ids or self.num_output_tokens is None or not self.silent_ns:
            return
        missing = self.num_output_tokens - len(self.chunk_ns)
        num_silent = len(self.silent_ns)
        # The last silent event is often the one that carries the finish reason, with or without a token.
        if missing == num_silent or (missing == num_silent - 1 and missing > 0 and self.finish_reason):
            self.chunk_ns = array("q", sorted([*self.chunk_ns, *self.silent_ns[:missing]]))

    def ttft_ns(self) -> int | None:
        """From the scheduled arrival to the first chunk."""
        return self.chunk_ns[0] - self.scheduled_ns if self.chunk_ns else None

    def ttft_from_send_ns(self) -> int | None:
        """From the write to the socket to the first chunk: blind to what delayed the send."""
        return self.chunk_ns[0] - self.sent_ns if self.chunk_ns else None

    def e2e_ns(self) -> int | None:
        """From the scheduled arrival to the end of the answer, for a request that has one."""
        return self.ended_ns - self.scheduled_ns if self.is_ok else None

    def e2e_from_send_ns(self) -> int | None:
        return self.ended_ns - self.sent_ns if self.is_ok else None

    def chunk_gaps_ns(self) -> list[int]:
        times = self.chunk_ns
        return [times[i] - times[i - 1] for i in range(1, len(times))]

    def token_gaps_ns(self) -> list[int] | None:
        """Token gaps in no particular order, or None where the number of tokens is not known."""
        num_tokens = self.num_tokens
        if num_tokens is None or num_tokens < len(self.chunk_ns):
            return None  # A server that splits tokens over chunks: nothing can be said of single tokens.
        if not self.chunk_ns:
            return []
        return self.chunk_gaps_ns() + [0] * (num_tokens - len(self.chunk_ns))

    def max_gap_ns(self) -> int | None:
        """The largest gap, of tokens and chunks alike; None for a stream of a single chunk."""
        return max(self.chunk_gaps_ns(), default=None)

    def tpot_ns(self) -> float | None:
        """The mean gap between tokens; None where it has none, or their number is not known."""
        num_tokens = self.num_tokens
        if num_tokens is None or num_tokens < 2 or not self.chunk_ns:
            return None
        return (self.chunk_ns[-1] - self.chunk_ns[0]) / (num_tokens - 1)

    def send_lag_ns(self) -> int:
        """How late the generator took it up: its own fault alone."""
        return self.started_ns - self.scheduled_ns
