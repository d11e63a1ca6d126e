"""Whether a worker's result answers its plan: what it brings is believed only then."""

from common.messages.logprobs import TokenScores
from common.messages.plans import IterationDone
from services.scheduler.worker import InFlight


def answers(flight: InFlight, done: IterationDone) -> bool:
    """Whether the result brings a token for exactly the rows that were to be sampled, and the scores asked for."""
    sampled = {placement.slot for placement in flight.sampled}
    if not (len(sampled) == len(done.slots) == len(done.token_ids) and sampled.issuperset(done.slots)):
        return False
    return _has_scores(flight, done)


def _has_scores(flight: InFlight, done: IterationDone) -> bool:
    """Whether the result brings the scores that its rows ask for, and no others."""
    sampled = {row.slot: row.scores for row in done.sampled_scores}
    prompts = {row.slot: row for row in done.prompt_scores}
    for placement in flight.decodes:
        num_top = placement.request.arrived.sampling.logprobs
        if num_top is not None and not _is_whole(sampled.pop(placement.slot, None), 1, num_top):
            return False
    for chunk, placement in zip(flight.plan.chunks, flight.chunks, strict=True):
        request, sampling = placement.request, placement.request.arrived.sampling
        num_top = sampling.logprobs if chunk.is_sampled else None
        if num_top is not None and not _is_whole(sampled.pop(chunk.slot, None), 1, num_top):
            return False
        if num_scored := request.num_scored_in(chunk.start, chunk.num_tokens):
            row = prompts.pop(chunk.slot, None)
            if row is None or row.first_index != max(chunk.start + 1, request.num_scored):
                return False
            if not _is_whole(row.scores, num_scored, sampling.prompt_logprobs or 0):
                return False
    return not sampled and not prompts


def _is_whole(scores: TokenScores | None, num_tokens: int, num_top: int) -> bool:
    return scores is not None and scores.is_whole(num_tokens, num_top)
