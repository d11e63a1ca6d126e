"""From tokens to text, one token at a time: never half a character, and none lost.

Byte-level vocabularies (GPT-2's kind, most models) have a table of bytes and an incremental UTF-8 decoder: linear, and
exact for any tokens. Others (SentencePiece's kind: a space that belongs to the next word, bytes as a last resort) only
know how to decode a list of tokens, so a window of them is decoded twice and the difference is the new text, as in
text-generation-inference and vLLM.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

CONTEXT_TOKENS = 6
"""Prompt tokens before the output that a window starts with: enough for a space before the first word to show."""
MAX_HELD_TOKENS = 16
"""Tokens that a window waits for the rest of a character; four bytes are the longest, so this many are no character."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """The text of one stream of tokens. Special tokens are the caller's: they never come here."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes. An id out of the vocabulary gives none."""

    def finish(self) -> str:
        """Return what is left of an incomplete character: replacement characters, or nothing."""


DetokenizerFactory = Callable[[Sequence[int]], Detokenizer]
"""Makes a detokenizer for the output that follows a prompt."""


def detokenizers_of(tokenizer: Tokenizer) -> DetokenizerFactory:
    """Return what makes detokenizers for this vocabulary."""
    if is_byte_level(tokenizer):
        table = byte_table(tokenizer)
        return lambda prompt_ids: ByteDetokenizer(table)
    return lambda prompt_ids: WindowDetokenizer(tokenizer, prompt_ids)


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether tokens are bytes in GPT-2's printable alphabet, and nothing but a join is between them and the text."""
    description: dict[str, Any] | None = json.loads(tokenizer.to_str())["decoder"]
    if description is None:
        return False
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    return [step["type"] for step in steps] == ["ByteLevel"]


def byte_table(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of each token id of a byte-level vocabulary; empty where there is no such token."""
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        try:
            table[token_id] = bytes(byte_of[character] for character in token)
        except KeyError:  # An added token, written as it is.
            table[token_id] = token.encode()
    return table


def byte_alphabet() -> str:
    """Return the character that stands for each byte in a byte-level vocabulary (GPT-2, Radford et al. 2019).

    Printable bytes stand for themselves; the others, in order, for the characters from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


class ByteDetokenizer:
    """Joins bytes. The sum of what it returns is all bytes decoded at once, malformed ones replaced."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < len(self._table):
            return ""
        return self._decode(self._table[token_id])

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """Decodes the last tokens with and without the new ones; the difference is the new text.

    The window begins with tokens whose text is out already, because how a token decodes may depend on what is before
    it: a first word loses its space.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        if tokenizer.decode(self._window).endswith(_REPLACEMENT):
            # A prompt of ids may end within a character. The output's text begins with the output, so its rest is
            # malformed there; it must not take away from what follows.
            self._window = []
        self._num_out = len(self._window)  # tokens of the window whose text is out

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._release(is_forced=len(self._window) - self._num_out > MAX_HELD_TOKENS)

    def finish(self) -> str:
        return self._release(is_forced=True)

    def _release(self, *, is_forced: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._num_out])
        after = self._tokenizer.decode(self._window)
        if (len(after) <= len(before) or after.endswith(_REPLACEMENT)) and not is_forced:
            return ""
        del self._window[: self._num_out]
        self._num_out = len(self._window)
        return after[len(before) :]
