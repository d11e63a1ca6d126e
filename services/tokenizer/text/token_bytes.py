"""What each token of a vocabulary adds to the text, as bytes: a token can be part of a character."""

import json
import re
from typing import Any

from tokenizers import Tokenizer

from services.tokenizer.text.detokenizer import byte_table, is_byte_level

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def token_bytes_of(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of each token id; empty where there is no such token. An added token is written as it is.

    Takes a tenth of a second for a large vocabulary.
    """
    if is_byte_level(tokenizer):
        return byte_table(tokenizer)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    has_byte_tokens = _falls_back_to_bytes(tokenizer)
    for token, token_id in vocabulary.items():
        is_byte = _BYTE.fullmatch(token) if has_byte_tokens else None
        table[token_id] = bytes.fromhex(is_byte[1]) if is_byte else token.replace(_SPACE, " ").encode()
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        table[token_id] = added.content.encode()
    return table


def _falls_back_to_bytes(tokenizer: Tokenizer) -> bool:
    """Whether a character that is no token is written as tokens of single bytes."""
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return bool(model.get("byte_fallback"))
