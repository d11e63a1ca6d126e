"""Scores on their way up: token ids become what a client can read."""

from collections.abc import Iterable, Sequence

from common.messages.logprobs import TokenLogprob, TokenScores, TopLogprob
from common.messages.requests import PromptDelta, RequestQueued
from common.messages.streams import PromptScored
from services.tokenizer.open_requests import Request
from services.tokenizer.text.stream import TextStream


def prompt_begun(queued: RequestQueued, request: Request) -> PromptDelta | None:
    """The text of a prompt that is to be echoed, and its first token, which no score will come for."""
    if (echo := request.echo) is None:
        return None
    first: tuple[TokenLogprob, ...] = ()
    if request.token_bytes is not None:
        first = (TokenLogprob(_bytes_of(request.token_bytes, echo.token_ids[0]), None, 0),)
    return PromptDelta(queued.request_id, request.attempt, echo.text, 0, first)


def prompt_scored(scored: PromptScored, request: Request) -> PromptDelta:
    """More tokens of an echoed prompt."""
    echo, table = request.echo, request.token_bytes
    assert echo is not None, "prompts are scored where they are echoed"
    assert table is not None, "prompts are scored where tokens are readable"
    start, end = scored.first_index, scored.first_index + scored.scores.num_tokens
    logprobs = _readable(scored.scores, echo.token_ids[start:end], echo.offsets[start:end], table)
    return PromptDelta(scored.request_id, request.attempt, "", start, logprobs)


def output_logprobs(
    request: Request, stream: TextStream, token_ids: Sequence[int], scores: TokenScores | None, num_known: int
) -> tuple[TokenLogprob, ...]:
    """Return what a client can read of the scores of the tokens that stream has just taken; nothing where they are not
    scored. The first num_known scores are of tokens that were taken before."""
    if scores is None or request.token_bytes is None:
        return ()
    start = 0 if request.echo is None else len(request.echo.text)
    offsets = [start + offset for offset in stream.offsets]
    rows = list(scores)[num_known : num_known + len(token_ids)]
    return _readable(rows, token_ids, offsets, request.token_bytes)


def _readable(
    scores: Iterable[tuple[float, list[tuple[int, float]]]],
    token_ids: Sequence[int],
    offsets: Sequence[int],
    table: list[bytes],
) -> tuple[TokenLogprob, ...]:
    """Return scores with tokens as bytes.

    Args:
        scores: Of these tokens, as TokenScores gives them.
        token_ids: The tokens.
        offsets: Where in the client's text each begins.
        table: The bytes of every token id.
    """
    return tuple(
        TokenLogprob(
            _bytes_of(table, token_id),
            logprob,
            offset,
            tuple([TopLogprob(_bytes_of(table, top_id), top_logprob) for top_id, top_logprob in top]),
        )
        for token_id, offset, (logprob, top) in zip(token_ids, offsets, scores, strict=True)
    )


def _bytes_of(table: list[bytes], token_id: int) -> bytes:
    """A model may have more tokens than its tokenizer: padding, which gives no text."""
    return table[token_id] if token_id < len(table) else b""
