"""Between gateway and tokenizer: requests going down, text coming up."""

from enum import StrEnum
from typing import Any

import msgspec

from common.ids import RequestId, WorkerId
from common.messages.base import Message, Row
from common.messages.gaps import NO_GAP, WorkerGap
from common.messages.logprobs import TokenLogprob


class FinishReason(StrEnum):
    """Why a request ended. The first two are OpenAI's words."""

    STOP = "stop"  # an end-of-sequence id, a stop id, or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    CANCELLED = "cancelled"  # its client went away
    ERROR = "error"  # detail says what failed


class RejectReason(StrEnum):
    """Why a request never ran. The gateway maps each to an HTTP status."""

    INVALID = "invalid"  # 400, param names the field
    UNKNOWN_MODEL = "unknown_model"  # 404
    TOO_LARGE = "too_large"  # 400: no worker of the pool could ever hold it
    QUEUE_FULL = "queue_full"  # 429: too many wait already
    QUEUE_TIMEOUT = "queue_timeout"  # 503: waited longer than allowed
    UNAVAILABLE = "unavailable"  # 503: no worker, or a link was full or lost


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How a token is drawn from logits, and what is told of it. Validated at the gateway; below it, known to be good.

    Drawing is a function of (logits, seed, position) and of the request's own tokens before that position, where
    position is the index of the drawn token in prompt and output together.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0  # no end-of-sequence or stop id is drawn before so many output tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0  # taken off the logit of each token that the output has already
    frequency_penalty: float = 0.0  # the same, times how often
    repetition_penalty: float = 1.0  # divides a positive logit of each token of prompt and output, multiplies others
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit); each id once
    logprobs: int | None = None  # output tokens are scored, with so many of the likeliest in each one's place
    prompt_logprobs: int | None = None  # the same of prompt tokens


class Choice(Row, frozen=True):
    """One completion of a Submit."""

    request_id: RequestId
    seed: int  # int64; drawn by the gateway, once, where the client gave none
    output_ids: bytes = b""  # pack_ids of output tokens delivered by an earlier attempt; they come after the prompt


class TextPrompt(msgspec.Struct, frozen=True, tag=True):
    text: str


class IdsPrompt(msgspec.Struct, frozen=True, tag=True):
    token_ids: bytes  # pack_ids


class ChatPrompt(msgspec.Struct, frozen=True, tag=True):
    """Rendered by the model's chat template. Messages are plain JSON values whose shape the gateway has checked."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True


Prompt = TextPrompt | IdsPrompt | ChatPrompt


class Submit(Message, frozen=True, kw_only=True):
    """One prompt and its n choices, gateway to tokenizer. Each choice ends with exactly one terminal message:
    RequestEnded or RequestRejected."""

    attempt: int  # 1, then one more each time the gateway submits again
    model: str
    prompt: Prompt
    choices: tuple[Choice, ...]
    sampling: Sampling
    max_tokens: int | None  # absent: to the end of the context
    stop: tuple[str, ...] = ()  # stop strings
    has_echo: bool = False  # the prompt's text comes before the output's, and its tokens where they are scored
    priority: int = 0  # lower runs earlier
    tbt_target_ms: float | None = None
    ttft_target_ms: float | None = None
    deadline_ms: float | None = None
    cache_salt: str = ""
    traceparent: str = ""  # W3C trace context, passed through every hop
    tracestate: str = ""


class Cancel(Message, frozen=True, kw_only=True):
    """These requests' client has gone. Gateway to tokenizer, and tokenizer to scheduler. Unknown ids are ignored."""

    request_ids: tuple[RequestId, ...]


class Encode(Message, frozen=True, kw_only=True):
    """`/tokenize`: answered by one Encoded or CallFailed with the same call_id."""

    call_id: str
    model: str
    prompt: TextPrompt | ChatPrompt
    add_special_tokens: bool = True


class Encoded(Message, frozen=True, kw_only=True):
    call_id: str
    token_ids: bytes  # pack_ids
    max_model_len: int


class Decode(Message, frozen=True, kw_only=True):
    """`/detokenize`: answered by one Decoded or CallFailed with the same call_id."""

    call_id: str
    model: str
    token_ids: bytes  # pack_ids


class Decoded(Message, frozen=True, kw_only=True):
    call_id: str
    text: str


class CallFailed(Message, frozen=True, kw_only=True):
    call_id: str
    reason: RejectReason
    detail: str
    param: str = ""


class Stamps(Row, frozen=True):
    """When tokens passed each hop, by that hop's own monotonic clock; 0 where a hop has not stamped yet.

    Only differences between two tokens' stamps of one hop mean anything (DESIGN section 5).
    """

    worker_id: WorkerId  # whose clock worker_ns is
    iteration: int  # the worker's iteration that sampled the tokens
    worker_ns: int  # the iteration finished
    scheduler_ns: int = 0  # the tokens were passed on
    tokenizer_ns: int = 0  # their text was passed on


class RequestQueued(Message, frozen=True, kw_only=True):
    """The request was admitted and waits for a worker. Scheduler to tokenizer to gateway, before any token."""

    request_id: RequestId
    attempt: int
    num_prompt_tokens: int


class RequestEnded(Message, frozen=True, kw_only=True):
    """Terminal: the request ran. Scheduler to tokenizer; the tokenizer alone decides what the gateway sees."""

    request_id: RequestId
    attempt: int
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int  # of all attempts; usage
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    stop: str | int | None = None  # the stop string or stop id that ended it
    detail: str = ""


class RequestRejected(Message, frozen=True, kw_only=True):
    """Terminal: the request never ran."""

    request_id: RequestId
    attempt: int
    reason: RejectReason
    detail: str  # with the numbers: "prompt has 9000 tokens; this model accepts 8192"
    param: str = ""  # the API field at fault
    retry_after_s: float | None = None


class TextDelta(Row, frozen=True):
    """New tokens of one request, with the text that they complete.

    Token ids travel at once, also while they give no text yet (half a character, or what may become a stop string).
    """

    request_id: RequestId
    attempt: int
    first_index: int  # index in the output of the first of token_ids
    token_ids: tuple[int, ...]
    text_offset: int  # characters of output text before this text
    text: str
    stamps: Stamps
    gap: int = NO_GAP  # index into TextBatch.gaps of what lies between the first token and the one before
    logprobs: tuple[TokenLogprob, ...] = ()  # parallel to token_ids where they were asked for


class PromptDelta(Row, frozen=True):
    """Part of an echoed prompt: its text, all at once, and its tokens as they are scored."""

    request_id: RequestId
    attempt: int
    text: str  # of the whole prompt, with the first part
    first_index: int  # index in the prompt of the first of logprobs
    logprobs: tuple[TokenLogprob, ...] = ()


class TextBatch(Message, frozen=True, kw_only=True):
    """All that one tokenizer has for one gateway after one event, in order: queued, then echoed prompts, then text,
    then ends."""

    queued: tuple[RequestQueued, ...] = ()
    prompts: tuple[PromptDelta, ...] = ()
    deltas: tuple[TextDelta, ...] = ()
    gaps: tuple[WorkerGap, ...] = ()  # as the scheduler divided them
    ended: tuple[RequestEnded | RequestRejected, ...] = ()
