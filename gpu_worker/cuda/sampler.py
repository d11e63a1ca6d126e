"""gpu_worker.sampler for a whole batch at once, on the device, without a look at any value.

The rules are the same, word for word: greedy below the least temperature, else the race of scaled logits and noise
that is a hash of (seed, position, token id), among what top_k, then top_p, then min_p keep.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.messages.requests import Sampling
from gpu_worker.sampler import gumbel, noise_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Of the rows that are sampled; each (samples,) on the device."""

    is_greedy: Tensor  # bool
    seeds: Tensor  # int64
    positions: Tensor  # int64, index of the drawn token in prompt and output together
    temperatures: Tensor  # float32, above 0
    top_ks: Tensor  # int64; 0 keeps all
    top_ps: Tensor  # float32
    min_ps: Tensor  # float32


@dataclass(frozen=True, slots=True)
class Needs:
    """What at least one of the rows asks for; the host knows it from their requests."""

    race: bool
    sorting: bool  # top_k or top_p


def needs_of(raced: Sequence[Sampling]) -> Needs:
    """Return what rows need of which these are not greedy."""
    return Needs(race=bool(raced), sorting=any(sampling.top_k > 0 or sampling.top_p < 1 for sampling in raced))


def draw(logits: Tensor, parameters: Parameters, needs: Needs, *, row_by_row: bool = False) -> Tensor:
    """Return one token for each row: (samples,) int64.

    Args:
        logits: (samples, vocab), of any float dtype.
        parameters: Of the rows.
        needs: Steps that may be left out where no row needs them.
        row_by_row: Take sums over the vocabulary of one row at a time: of several, a device adds in another order.
    """
    best = logits.argmax(dim=-1)
    if not needs.race:
        return best
    scaled = logits.float() / parameters.temperatures.unsqueeze(1)
    least = _least_by_min_p(scaled, parameters.min_ps)
    if needs.sorting:
        size = 1 if row_by_row else len(scaled)
        pieces = (torch.split(tensor, size) for tensor in (scaled, parameters.top_ks, parameters.top_ps))
        least = torch.maximum(least, torch.cat([_least_by_rank(*piece) for piece in zip(*pieces, strict=True)]))
    candidates = scaled.masked_fill(scaled < least.unsqueeze(1), float("-inf"))
    raced = candidates.add_(_noise(parameters, logits.shape[1])).argmax(dim=-1)
    return torch.where(parameters.is_greedy, best, raced)


def adjust(
    logits: Tensor, sampling: Sampling, token_ids: Tensor, num_prompt_tokens: int, upload: Callable[[Tensor], Tensor]
) -> None:
    """Apply a request's penalties, then its biases, to its row of float32 logits, (vocab,), in place.

    Args:
        logits: One row.
        sampling: The request's.
        token_ids: (position,) int32 on the device: prompt, then output.
        num_prompt_tokens: How many of them are prompt.
        upload: Brings a host tensor to the device without waiting.
    """
    if sampling.repetition_penalty != 1:
        factor = sampling.repetition_penalty
        penalised = torch.where(logits > 0, logits / factor, logits * factor)
        logits.copy_(torch.where(_counts(token_ids, logits) > 0, penalised, logits))
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = _counts(token_ids[num_prompt_tokens:], logits)
        logits.sub_(sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0))
    if sampling.logit_bias:
        biased, biases = zip(*sampling.logit_bias, strict=True)
        logits.index_add_(0, upload(torch.tensor(biased, dtype=torch.int64)), upload(torch.tensor(biases)))


def _counts(token_ids: Tensor, logits: Tensor) -> Tensor:
    """Return how often each token of the vocabulary is among token_ids: shaped as logits, float32."""
    ones = torch.ones(len(token_ids), dtype=torch.float32, device=token_ids.device)
    return torch.zeros_like(logits).index_add_(0, token_ids.long(), ones)


def _least_by_min_p(scaled: Tensor, min_ps: Tensor) -> Tensor:
    """Return the smallest logit that min_p keeps, (samples,): p >= min_p * p_max, in logarithms; -inf for 0."""
    return scaled.amax(dim=1) + min_ps.log()


def _least_by_rank(scaled: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Return the smallest logit that top_k, then top_p keep, (samples,). Ties with it are kept."""
    vocab_size = scaled.shape[1]
    descending = scaled.sort(dim=1, descending=True).values
    keeps_all = (top_ks <= 0) | (top_ks >= vocab_size)
    last = (top_ks - 1).clamp(0, vocab_size - 1).unsqueeze(1)
    by_top_k = descending.gather(1, last).squeeze(1).masked_fill(keeps_all, float("-inf"))
    kept = descending.masked_fill(descending < by_top_k.unsqueeze(1), float("-inf"))
    shares = (kept - kept.logsumexp(dim=1, keepdim=True)).exp().double()
    before = shares.cumsum(dim=1) - shares
    # Each token before which the mass is not reached yet; always the first.
    num_kept = (before < top_ps.double().unsqueeze(1)).sum(dim=1).clamp(min=1)
    by_top_p = kept.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1)
    return torch.maximum(by_top_k, by_top_p.masked_fill(top_ps >= 1, float("-inf")))


def _noise(parameters: Parameters, vocab_size: int) -> Tensor:
    """Return each row's Gumbel noise for every token, (samples, vocab) float32, as gpu_worker.sampler.noise does."""
    keys = noise_keys(parameters.seeds, parameters.positions)
    token_ids = torch.arange(vocab_size, device=keys.device)
    return gumbel(keys.unsqueeze(1), token_ids.unsqueeze(0))
