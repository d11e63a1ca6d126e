"""Drawing tokens: a function of (logits, seed, position) alone, and of the request's own parameters and tokens.

Temperature sampling is a race (the Gumbel-max trick): each token's scaled logit gets noise, and the greatest sum
wins, with exactly the softmax's probabilities. The noise of a token is a hash of (seed, position, token id), not the
next number of a generator. So a token comes out the same whatever the neighbours, whatever was drawn before, on
whichever worker; and a filter only takes candidates out of the race, it does not change the others' noise.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from common.messages.requests import Sampling

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014; constants of Stafford's mix 13).
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_FRACTION_BITS = 53
LEAST_TEMPERATURE = 1e-5
"""Below it sampling is greedy: noise of a few units cannot overtake logits scaled so far up, and they may overflow."""
_TOP_CANDIDATES = 1024
"""top_p first looks among so many of the likeliest tokens: sorting 49k logits takes 3 ms, finding these 0.3."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one token is drawn by."""

    sampling: Sampling
    seed: int
    position: int  # index of the drawn token in prompt and output together
    num_prompt_tokens: int
    # Before position: prompt, then output. Only penalties look at them.
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))

    @property
    def is_greedy(self) -> bool:
        # One candidate is the best one: also where two are tied, between which a race would choose by noise.
        return self.sampling.temperature < LEAST_TEMPERATURE or self.sampling.top_k == 1

    @property
    def is_end_barred(self) -> bool:
        """Whether the output is still too short to end here."""
        return self.position - self.num_prompt_tokens < self.sampling.min_tokens

    @property
    def is_adjusted(self) -> bool:
        """Whether penalties or biases change its logits."""
        return is_adjusted(self.sampling)


def is_adjusted(sampling: Sampling) -> bool:
    """Whether penalties or biases change logits."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1
        or sampling.logit_bias
    )


def sample(logits: Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> Tensor:
    """Return one token for each row: (rows,) int64.

    Args:
        logits: (rows, vocab), of any float dtype. May be written to.
        draws: One for each row.
        eos_token_ids: The model's, barred with a request's own stop ids until its min_tokens are there.
    """
    for row, draw in enumerate(draws):
        if draw.is_end_barred:
            ends = (*eos_token_ids, *draw.sampling.stop_token_ids)
            # An id outside the vocabulary cannot come, so it need not be barred.
            barred = [token_id for token_id in ends if 0 <= token_id < logits.shape[1]]
            logits[row, barred] = float("-inf")
    best = logits.argmax(dim=-1)  # (rows,)
    for row, draw in enumerate(draws):
        if draw.is_greedy and not draw.is_adjusted:
            continue
        mine = logits[row].float()
        if draw.is_adjusted:
            adjust(mine, draw)
        best[row] = mine.argmax() if draw.is_greedy else _race(mine, draw)
    return best


def adjust(logits: Tensor, draw: Draw) -> None:
    """Apply the request's penalties, then its biases, to one row of float32 logits, (vocab,), in place.

    In this order: the repetition penalty, of tokens of prompt and output (CTRL, Keskar et al. 2019); the frequency and
    presence penalties, of tokens of the output alone (OpenAI); the biases, which so mean the same whatever came before.
    """
    sampling = draw.sampling
    if sampling.repetition_penalty != 1:
        known, _ = _counts_of(draw.token_ids)
        scores = logits[known]
        factor = sampling.repetition_penalty
        logits[known] = torch.where(scores > 0, scores / factor, scores * factor)
    if sampling.frequency_penalty or sampling.presence_penalty:
        drawn, counts = _counts_of(draw.token_ids[draw.num_prompt_tokens :])
        logits[drawn] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        logits[torch.tensor(token_ids)] += torch.tensor(biases)


def _counts_of(token_ids: "array[int]") -> tuple[Tensor, Tensor]:
    """Return which tokens there are, int64, and how often each, float32.

    Counted anew each time: 0.1 ms at 8,000 tokens of a vocabulary of 49k is less trouble than a count that must be
    right after every preemption.
    """
    if not token_ids:
        return torch.empty(0, dtype=torch.int64), torch.empty(0)
    counts = np.bincount(np.frombuffer(token_ids, dtype=np.int32))
    present = (counts > 0).nonzero()[0]  # Six times as fast as of the counts themselves.
    return torch.from_numpy(present), torch.from_numpy(counts[present]).float()


def noise(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Return each token's Gumbel noise: float32, shaped as token_ids, which is int64."""
    # Three words through one mixer in turn; integer tensors wrap as the arithmetic of the original does.
    return gumbel(_signed(_mix(_mix((seed & _WORD) + _GOLDEN & _WORD) + position & _WORD)), token_ids)


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return what gumbel takes for many rows at once: (rows,) int64, as seeds and positions."""
    return _mixed(_mixed(seeds + _signed(_GOLDEN)) + positions)


def gumbel(key: Tensor | int, token_ids: Tensor) -> Tensor:
    """Return the noise of tokens under a key of noise_keys: float32, of the shape that the two broadcast to."""
    bits = _mixed(token_ids * _signed(_GOLDEN) + key)
    # Uniform in (0, 1), and near 0 as fine as float32 can be. Winners have small values here, since -log(1 - u) is an
    # exponential waiting time and the Gumbel variable is its negative logarithm.
    uniform = _shifted_right(bits, 64 - _FRACTION_BITS).float().add_(0.5).mul_(2.0**-_FRACTION_BITS)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _race(logits: Tensor, draw: Draw) -> Tensor:
    """Return the winner among the candidates of one row of float32 logits."""
    scaled = logits / draw.sampling.temperature
    least = _least_kept(scaled, draw.sampling)
    if least is None:
        return (scaled + noise(draw.seed, draw.position, torch.arange(len(scaled)))).argmax()
    candidates = (scaled >= least).nonzero().squeeze(1)  # (candidates,) ascending, so that ties fall as without filter
    return candidates[(scaled[candidates] + noise(draw.seed, draw.position, candidates)).argmax()]


def _least_kept(scaled: Tensor, sampling: Sampling) -> Tensor | None:
    """Return the smallest scaled logit that top_k, then top_p, then min_p keep; None if they keep all.

    Tokens as likely as the last one kept are kept too, so that the set does not depend on how ties are sorted.
    """
    least: Tensor | None = None
    if 0 < sampling.top_k < len(scaled):
        least = scaled.topk(sampling.top_k).values[-1]
    if sampling.top_p < 1:
        kept = scaled if least is None else scaled[scaled >= least]
        least = _least_of_mass(kept, sampling.top_p)
    if sampling.min_p > 0:
        # p >= min_p * p_max, in logarithms: no need for the probabilities themselves.
        by_min_p = scaled.max() + torch.tensor(sampling.min_p).log()
        least = by_min_p if least is None else torch.maximum(least, by_min_p)
    return least


def _least_of_mass(scaled: Tensor, mass: float) -> Tensor:
    """Return the smallest member of the fewest greatest logits whose probabilities sum to mass or more."""
    total = scaled.logsumexp(dim=0)
    for num_candidates in (min(_TOP_CANDIDATES, len(scaled)), len(scaled)):
        candidates = scaled.topk(num_candidates).values  # descending
        before = (candidates - total).exp().double().cumsum(dim=0) - (candidates - total).exp().double()
        num_kept = int((before < mass).sum())  # Each token before which mass is not yet reached; always the first.
        if num_kept < num_candidates or num_candidates == len(scaled):
            return candidates[max(num_kept, 1) - 1]
    raise AssertionError("the second round holds every token")


def _mix(word: int) -> int:
    """One round of SplitMix64's finaliser on a Python integer."""
    word = (word ^ (word >> 30)) * _MIX_1 & _WORD
    word = (word ^ (word >> 27)) * _MIX_2 & _WORD
    return word ^ (word >> 31)


def _mixed(bits: Tensor) -> Tensor:
    """The same round on int64 tensors, in place."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits.bitwise_xor_(_shifted_right(bits, shift)).mul_(_signed(factor))
    return bits.bitwise_xor_(_shifted_right(bits, 31))


def _shifted_right(bits: Tensor, shift: int) -> Tensor:
    """Shift as if unsigned: int64 would drag its sign along."""
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(word: int) -> int:
    """Return the 64-bit word as the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word
