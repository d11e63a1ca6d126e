"""Log-probabilities of tokens, as the model itself has them (see common.messages.logprobs)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.messages.logprobs import TokenScores


class ScoreBook:
    """Scores of neighbouring tokens of one request, as they come."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._logprobs: list[float] = []
        self._top_ids: list[int] = []
        self._top_logprobs: list[float] = []

    def add(self, logprobs: Tensor, token_ids: Sequence[int]) -> None:
        """Add tokens.

        Args:
            logprobs: (tokens, vocab), of log_probabilities, of every token that could be in each one's place.
            token_ids: Those that are.
        """
        self._logprobs += logprobs[torch.arange(len(token_ids)), torch.tensor(token_ids)].tolist()
        if self._num_top:
            values, indices = logprobs.topk(min(self._num_top, logprobs.shape[1]))  # (tokens, num_top), descending
            self._top_ids += indices.flatten().tolist()
            self._top_logprobs += values.flatten().tolist()

    def scores(self) -> TokenScores:
        return TokenScores.of(self._logprobs, self._top_ids, self._top_logprobs)


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the logarithm of the softmax of each row, (rows, vocab) float32, of logits of any dtype.

    A copy, also of float32: the sampler may write to the logits. Each row is summed by itself, in the same order
    whatever its neighbours are.
    """
    return logits.float().log_softmax(dim=-1)
