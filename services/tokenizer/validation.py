"""Whether a request can run at all, with the numbers that say why not."""

from dataclasses import dataclass

from common.messages import PoolCard, Submit
from common.messages.requests import RejectReason, Sampling

RETRY_AFTER_S = 1.0
"""When to try again after a refusal for want of something that comes back: room here, a worker, a link."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request or call is turned away."""

    reason: RejectReason
    detail: str
    param: str = ""
    retry_after_s: float | None = None


def check_model(model: str, card: PoolCard | None) -> Refusal | None:
    """Return why no pool serves this model now, if none does."""
    if card is None:
        return unavailable("no scheduler has said yet which model it serves")
    if model != card.model.name:
        detail = f"the model {model!r} does not exist; this server has {card.model.name!r}"
        return Refusal(RejectReason.UNKNOWN_MODEL, detail, "model")
    return None


def check_parameters(submit: Submit, card: PoolCard) -> Refusal | None:
    """Return what is wrong with a request whatever its prompt is, if anything."""
    sampling, vocab_size = submit.sampling, card.model.vocab_size
    if "" in submit.stop:
        return Refusal(RejectReason.INVALID, "a stop string is empty", "stop")
    for token_id in sampling.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            detail = f"token id {token_id} is outside the vocabulary, 0 to {vocab_size - 1}"
            return Refusal(RejectReason.INVALID, detail, "stop_token_ids")
    for token_id, _ in sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            detail = f"token id {token_id} is outside the vocabulary, 0 to {vocab_size - 1}"
            return Refusal(RejectReason.INVALID, detail, "logit_bias")
    if not card.model.has_logprobs and (sampling.logprobs, sampling.prompt_logprobs) != (None, None):
        return Refusal(RejectReason.INVALID, "this pool's workers tell of no log-probabilities", "logprobs")
    if not card.model.has_penalties and (name := _penalty_of(sampling)):
        return Refusal(RejectReason.INVALID, f"this pool's workers know no {name}", name)
    if submit.max_tokens is not None and submit.max_tokens < 1:
        return Refusal(RejectReason.INVALID, f"max_tokens is {submit.max_tokens}; the least is 1", "max_tokens")
    if submit.max_tokens is not None and sampling.min_tokens > submit.max_tokens:
        detail = f"min_tokens is {sampling.min_tokens}, more than max_tokens, {submit.max_tokens}"
        return Refusal(RejectReason.INVALID, detail, "min_tokens")
    return None


def _penalty_of(sampling: Sampling) -> str:
    """The API field of a penalty or bias that the request asks for; empty if it asks for none."""
    neutral = Sampling()
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"):
        if getattr(sampling, name) != getattr(neutral, name):
            return name
    return ""


def fit(submit: Submit, num_prompt_tokens: int, card: PoolCard, prompt_param: str) -> int | Refusal:
    """Return how many output tokens the request may have, or why it can never run.

    Args:
        submit: The request, past check_parameters.
        num_prompt_tokens: Of its prompt.
        card: The pool as it is now.
        prompt_param: The API field of the prompt.
    """
    context, capacity = card.model.max_model_len, card.kv_capacity
    for room, reason, owner in (
        (context, RejectReason.INVALID, "this model accepts"),
        (capacity, RejectReason.TOO_LARGE, "the largest worker's KV cache holds"),
    ):
        if num_prompt_tokens >= room:
            detail = f"prompt has {num_prompt_tokens} tokens; {owner} {room}, of which the output needs at least 1"
            return Refusal(reason, detail, prompt_param)
        if submit.max_tokens is not None and num_prompt_tokens + submit.max_tokens > room:
            detail = (
                f"prompt has {num_prompt_tokens} tokens and max_tokens is {submit.max_tokens}, "
                f"together {num_prompt_tokens + submit.max_tokens}; {owner} {room}"
            )
            return Refusal(reason, detail, "max_tokens")
    max_tokens = submit.max_tokens or min(context, capacity) - num_prompt_tokens
    if submit.sampling.min_tokens > max_tokens:
        detail = (
            f"min_tokens is {submit.sampling.min_tokens}; "
            f"after a prompt of {num_prompt_tokens} tokens there is room for {max_tokens}"
        )
        return Refusal(RejectReason.INVALID, detail, "min_tokens")
    return max_tokens


def unavailable(detail: str) -> Refusal:
    """Return the refusal for what may work again in a moment."""
    return Refusal(RejectReason.UNAVAILABLE, detail, retry_after_s=RETRY_AFTER_S)


def queue_full(detail: str) -> Refusal:
    """Return the refusal of what is one too many."""
    return Refusal(RejectReason.QUEUE_FULL, detail, retry_after_s=RETRY_AFTER_S)
