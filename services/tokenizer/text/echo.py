"""A prompt as its client sees it again: its text, and where in that each of its tokens begins."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from services.tokenizer.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """What `echo` puts before the output."""

    text: str
    token_ids: Sequence[int]
    offsets: tuple[int, ...]  # of each token in text


def echo_of(text: str | None, token_ids: Sequence[int], detokenizer: Detokenizer, silent_ids: Set[int]) -> Echo:
    """Return a prompt's echo.

    Args:
        text: As the client sent it; None where it sent token ids, of which the text is then made.
        token_ids: The prompt's.
        detokenizer: A fresh one.
        silent_ids: Tokens that are no part of the client's text: those that encoding put around it.
    """
    pieces: list[str] = []
    offsets: list[int] = []
    num_chars = 0
    for token_id in token_ids:
        offsets.append(num_chars if text is None else min(num_chars, len(text)))
        if token_id not in silent_ids:
            pieces.append(detokenizer.push(token_id))
            num_chars += len(pieces[-1])
    return Echo("".join((*pieces, detokenizer.finish())) if text is None else text, token_ids, tuple(offsets))
