"""Log-probabilities in OpenAI's two shapes: a list of tokens in chat, parallel lists in completions."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from common.messages.logprobs import TokenLogprob

LEAST_LOGPROB = -9999.0
"""What OpenAI tells of a token that is all but impossible. JSON has no infinity."""


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat. top_logprobs has as many tokens as were asked for."""
    return {
        "content": [
            {
                **_chat_token(token.token, token.logprob),
                "top_logprobs": [_chat_token(top.token, top.logprob) for top in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion. top_logprobs holds the token itself, too, as OpenAI has it."""
    return {
        "tokens": [_completion_text(token.token) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob) for token in tokens],
        "top_logprobs": [_completion_top(token) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def _chat_token(token: bytes, logprob: float | None) -> dict[str, Any]:
    logprob = LEAST_LOGPROB if logprob is None else _finite(logprob)
    return {"token": _text_or(token, ""), "logprob": logprob, "bytes": list(token)}


def _completion_top(token: TokenLogprob) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    # Likeliest first. Two tokens of the same text have one place in it: the likelier one's.
    top: dict[str, float] = {}
    for other in token.top:
        top.setdefault(_completion_text(other.token), _finite(other.logprob))
    top.setdefault(_completion_text(token.token), _finite(token.logprob))
    return top


def _completion_text(token: bytes) -> str:
    return _text_or(token, "bytes:")


def _text_or(token: bytes, prefix: str) -> str:
    """The token as text; one that is part of a character as escaped bytes after prefix."""
    try:
        return codecs.decode(token, "utf-8")
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
