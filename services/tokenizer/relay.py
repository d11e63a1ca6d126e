"""Text on its way up: what one message of the scheduler becomes for the gateways."""

from common.messages import StopReached, StreamBatch
from common.messages.gaps import NO_GAP
from common.messages.requests import (
    FinishReason,
    RequestEnded,
    RequestQueued,
    RequestRejected,
    Stamps,
    TextDelta,
)
from common.messages.streams import PromptScored, TokensSampled
from services.tokenizer.events import DropScheduler, Effect, ToScheduler
from services.tokenizer.open_requests import NO_STAMPS, OpenRequests, Outbox, Request
from services.tokenizer.scores import output_logprobs, prompt_begun, prompt_scored


def relay(batch: StreamBatch, requests: OpenRequests) -> list[Effect]:
    """Turn a batch of tokens into one batch of text a gateway, and find the stop strings in it.

    Messages about requests that have ended here, or of an older attempt, are waste and give nothing. Tokens known
    already are skipped. A gap means that a message was lost, so the link is no longer to be trusted.
    """
    outbox, stops = Outbox(batch.gaps), list[Effect]()
    stamps = batch.stamps or NO_STAMPS
    ends = {ended.request_id: ended for ended in batch.ended}
    for queued in batch.queued:
        if (request := _current(queued, requests)) is not None:
            outbox.queued(request.gateway, queued)
            if (prompt := prompt_begun(queued, request)) is not None:
                outbox.prompt(request.gateway, prompt)
    for scored in batch.scored:
        if (request := _current(scored, requests)) is None:
            continue
        if scored.first_index != request.num_scored:
            gap = f"{scored.request_id}: scores from prompt token {scored.first_index} on, not {request.num_scored}"
            return [*outbox.batches(), *stops, DropScheduler(gap)]
        request.num_scored += scored.scores.num_tokens
        outbox.prompt(request.gateway, prompt_scored(scored, request))
    for sampled in batch.sampled:
        if (request := _current(sampled, requests)) is None:
            continue
        if gap := _take(request, sampled, stamps, outbox):
            return [*outbox.batches(), *stops, DropScheduler(gap)]
        assert request.stream is not None, "a current request has a stream"
        if request.stream.stop is not None:
            told = ends.get(sampled.request_id)
            if told is None:  # Else the scheduler has ended it for reasons of its own.
                stop = StopReached(request_id=sampled.request_id, num_output_tokens=request.num_output_tokens)
                stops.append(ToScheduler(stop))
            request.num_cached_tokens = sampled.num_cached_tokens
            requests.end(sampled.request_id, FinishReason.STOP, outbox, stop=request.stream.stop, told=told)
    for ended in batch.ended:
        if _current(ended, requests) is not None:
            requests.pass_on(ended, stamps, outbox)
    # Text first: somebody waits for it, while a stop that comes late only costs a row of a batch.
    return [*outbox.batches(), *stops]


def _current(
    message: RequestQueued | PromptScored | TokensSampled | RequestEnded | RequestRejected, requests: OpenRequests
) -> Request | None:
    """The open request that a message is about; none if it has ended, or the message is of an older attempt."""
    request = requests.get(message.request_id)
    if request is None or request.stream is None or message.attempt < request.attempt:
        return None
    return request


def _take(request: Request, sampled: TokensSampled, stamps: Stamps, outbox: Outbox) -> str:
    """Take those of the tokens that are new. Return what is missing, if some before them are; else nothing."""
    stream = request.stream
    assert stream is not None, "a current request has a stream"
    first_index, text_offset = stream.num_tokens, stream.num_chars
    if sampled.first_index > first_index:
        return f"{sampled.request_id} misses its tokens {first_index} to {sampled.first_index - 1}"
    num_known = first_index - sampled.first_index
    token_ids = sampled.token_ids[num_known:]
    if token_ids:
        text = stream.push(token_ids)
        token_ids = token_ids[: stream.num_tokens - first_index]  # What follows a stop string is waste.
        delta = TextDelta(
            request_id=sampled.request_id,
            attempt=request.attempt,
            first_index=first_index,
            token_ids=token_ids,
            text_offset=text_offset,
            text=text,
            stamps=stamps,
            gap=sampled.gap if first_index == sampled.first_index else NO_GAP,
            logprobs=output_logprobs(request, stream, token_ids, sampled.scores, num_known),
        )
        outbox.delta(request.gateway, delta)
    return ""
