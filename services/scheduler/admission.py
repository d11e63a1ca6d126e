"""Whether a request may join the queue."""

from dataclasses import dataclass

from common.messages.requests import RejectReason
from common.messages.streams import RequestArrived
from services.scheduler.limits import Limits

LEAST_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not, with the numbers."""

    reason: RejectReason
    detail: str
    retry_after_s: float | None = None


def refusal_of(
    arrived: RequestArrived,
    limits: Limits,
    *,
    num_waiting: int,
    num_before: int,
    capacity: int | None,
    predicted_wait_ns: int,
    allowed_wait_ns: int,
) -> Refusal | None:
    """Return why the request is refused at once; None if it may wait.

    Args:
        arrived: The request.
        limits: The operator's bounds.
        num_waiting: Requests in the queue.
        num_before: Those of them that would begin before it.
        capacity: Tokens that the largest worker holds; None while there is no worker.
        predicted_wait_ns: How long it would wait, as far as can be said.
        allowed_wait_ns: How long it may.
    """
    needed = arrived.num_prompt_tokens + arrived.max_tokens - 1  # The last token's KV is never computed.
    if capacity is not None and needed > capacity:
        return Refusal(
            RejectReason.TOO_LARGE,
            f"prompt of {arrived.num_prompt_tokens} tokens and max_tokens {arrived.max_tokens} need {needed} tokens of "
            f"KV cache; the largest worker holds {capacity}",
        )
    if num_waiting >= limits.max_waiting:
        return Refusal(
            RejectReason.QUEUE_FULL,
            f"{num_waiting} requests are waiting, as many as may",
            retry_after_s=max(LEAST_RETRY_AFTER_S, predicted_wait_ns / max(1, num_before) / 1e9),
        )
    if predicted_wait_ns > allowed_wait_ns:
        return Refusal(
            RejectReason.QUEUE_FULL,
            f"{num_before} requests go before it: it would begin in {predicted_wait_ns / 1e9:.1f} s, "
            f"and it may wait {allowed_wait_ns / 1e9:.1f} s",
            retry_after_s=max(LEAST_RETRY_AFTER_S, (predicted_wait_ns - allowed_wait_ns) / 1e9),
        )
    return None
