"""Log-probabilities on their way up: numbers as far as the tokenizer, tokens with their bytes from there on.

They are the model's own, natural logarithms of the softmax of its logits: before temperature, penalties, biases and
filters. So those of output and prompt tokens mean the same, and neither depends on how a token was drawn.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator

from common.ids import pack_ids, unpack_ids
from common.messages.base import Row

MAX_TOP = 20
"""Alternatives that may be told of one token; the gateway refuses a request for more."""


class TokenScores(Row, frozen=True):
    """Of neighbouring tokens of one request, and of the likeliest tokens in each one's place. Worker to tokenizer."""

    logprobs: bytes  # little-endian float32, one a token
    top_ids: bytes  # pack_ids, the same number for each token, likeliest first
    top_logprobs: bytes  # float32, parallel to top_ids

    @classmethod
    def of(
        cls, logprobs: Iterable[float], top_ids: Iterable[int] = (), top_logprobs: Iterable[float] = ()
    ) -> "TokenScores":
        """Pack them; the two top lists are flat, token after token."""
        return cls(_pack_floats(logprobs), pack_ids(top_ids), _pack_floats(top_logprobs))

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs) // 4

    @property
    def num_top(self) -> int:
        """Alternatives of each token; the token itself may be among them."""
        return len(self.top_ids) // len(self.logprobs) if self.logprobs else 0

    def is_whole(self, num_tokens: int, num_top: int) -> bool:
        """Whether it holds exactly so much."""
        sizes = (len(self.logprobs), len(self.top_ids), len(self.top_logprobs))
        return sizes == (4 * num_tokens, 4 * num_tokens * num_top, 4 * num_tokens * num_top)

    def __iter__(self) -> Iterator[tuple[float, list[tuple[int, float]]]]:
        """Each token's log-probability, and the likeliest tokens in its place with theirs."""
        top = list(zip(unpack_ids(self.top_ids), _unpack_floats(self.top_logprobs), strict=True))
        num_top = self.num_top
        for index, logprob in enumerate(_unpack_floats(self.logprobs)):
            yield logprob, top[index * num_top : (index + 1) * num_top]


class TopLogprob(Row, frozen=True):
    """A token that could have come instead."""

    token: bytes  # what it adds to the text; a special token's name
    logprob: float


class TokenLogprob(Row, frozen=True):
    """One token as clients see it. Tokenizer to gateway."""

    token: bytes  # as TopLogprob's
    logprob: float | None  # absent for the first token of a prompt, which nothing precedes
    text_offset: int  # characters of the client's text that the tokens before it complete; an echoed prompt counts
    top: tuple[TopLogprob, ...] = ()  # likeliest first


def _pack_floats(values: Iterable[float]) -> bytes:
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack_floats(data: bytes) -> "array[float]":
    values = array("f")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
