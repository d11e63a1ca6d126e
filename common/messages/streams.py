"""Between tokenizer and scheduler: known tokens going down, sampled tokens coming up."""

from common.ids import RequestId, TokenizerId
from common.messages.base import Message, Row
from common.messages.gaps import NO_GAP, WorkerGap
from common.messages.logprobs import TokenScores
from common.messages.requests import RequestEnded, RequestQueued, RequestRejected, Sampling, Stamps


class RequestArrived(Message, frozen=True, kw_only=True):
    """A request, encoded and validated. Tokenizer to scheduler."""

    request_id: RequestId
    tokenizer_id: TokenizerId  # where its tokens go
    attempt: int
    token_ids: bytes  # pack_ids of all known tokens: the prompt, then what earlier attempts delivered
    num_prompt_tokens: int  # how many of them are prompt; the rest count as output
    max_tokens: int  # output tokens at most, over all attempts
    seed: int
    sampling: Sampling
    priority: int = 0
    tbt_target_ms: float | None = None
    ttft_target_ms: float | None = None
    deadline_ms: float | None = None
    cache_salt: str = ""
    traceparent: str = ""
    tracestate: str = ""


class StopReached(Message, frozen=True, kw_only=True):
    """The tokenizer found a stop string; tokens after the first num_output_tokens are waste.

    Tokenizer to scheduler. The tokenizer has sent the gateway the terminal by then; the scheduler sends none.
    """

    request_id: RequestId
    num_output_tokens: int


class TokensSampled(Row, frozen=True):
    """New tokens of one request. first_index counts output tokens of all attempts."""

    request_id: RequestId
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; the same in every row, for usage
    gap: int = NO_GAP  # index into StreamBatch.gaps of what lies between the first token and the one before
    scores: TokenScores | None = None  # of token_ids where Sampling.logprobs asks for them


class PromptScored(Row, frozen=True):
    """Prompt tokens of one request have been scored, where Sampling.prompt_logprobs asks for it. In order, each token
    once an attempt, and before any output token; the first token of a prompt has no score."""

    request_id: RequestId
    attempt: int
    first_index: int  # index in the prompt of the first one
    scores: TokenScores


class StreamBatch(Message, frozen=True, kw_only=True):
    """All that the scheduler has for one tokenizer after one event, in order: queued, then scored prompts, then tokens,
    then ends."""

    queued: tuple[RequestQueued, ...] = ()
    scored: tuple[PromptScored, ...] = ()
    sampled: tuple[TokensSampled, ...] = ()
    stamps: Stamps | None = None  # of sampled; absent where that is empty
    gaps: tuple[WorkerGap, ...] = ()  # the first is of streams with a token in the iteration before this one, too
    ended: tuple[RequestEnded | RequestRejected, ...] = ()
