"""Prompts of an exact number of tokens, made of random words that are one token each.

The words come from the server's own tokenizer, so that the length is what the server will count. Where it comes to
that, every answer's usage is compared with the length asked for, and the report says how many differ.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from loadtest.client import Client

_TEXT = """
about above after again ago air all along also always among any apple army around art ask away baby back bad ball
bank base bed big bird black blue boat body book both box bread bring build but buy call camp can care cat chair
city clean clear close cold cook corn cup cut dark deep dog dry early earth east egg empty end farm fast field fire
fish five floor food four free full game garden gold good grass great green hat high hill home horse ice iron island
key king lake land large late leaf light line long low milk moon music new north
"""

WORDS = tuple(_TEXT.split())
"""Common English words: one token in the vocabulary of practically every model, but checked all the same."""

POOL_LEN = 1 << 16
"""Words drawn once per run. A prompt is a slice of them behind a few words of its own, since drawing thousands of
words for each request would hold up the event loop."""

NUM_UNIQUE_WORDS = 12
"""Drawn anew for each prompt, in front: with a hundred words to choose from, no two prompts share even this much."""

MAX_VOCABULARY_WORDS = 4000
TOKENIZE_REPEATS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Words (or ids) that are one token each, and what the server adds around them."""

    words: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()  # instead of words: prompts are sent as ids
    num_added: int = 0  # special tokens that encoding a text prompt adds
    is_exact: bool = True  # False: taken on trust, since no tokenizer was to be had
    source: str = ""


class PromptMaker:
    """Makes prompts from a vocabulary. The same seed makes the same prompts."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self.vocabulary = vocabulary
        self._seed = seed
        units: list[str | int] = [*vocabulary.ids] or [*vocabulary.words]
        rng = random.Random(f"{seed}:pool")
        self._units = units
        self._pool = rng.choices(units, k=POOL_LEN)

    def make(self, num_tokens: int, index: int, turn: int = 0, prefix_share: float = 0.0) -> str | list[int]:
        """Return a prompt that the server counts as num_tokens (but at least one more than it adds itself).

        Args:
            num_tokens: With the special tokens that the server adds to a text.
            index: Which request of the run; each has its own prompt.
            turn: Which message of a conversation.
            prefix_share: The share of the tokens that all prompts of the run begin with, 0 to 1.
        """
        added = 0 if self.vocabulary.ids else self.vocabulary.num_added
        length = max(1, num_tokens - added)
        rng = random.Random(f"{self._seed}:{index}:{turn}")
        num_shared = round(length * prefix_share)
        num_own = length - num_shared
        own = rng.choices(self._units, k=min(NUM_UNIQUE_WORDS, num_own))
        rest = self._slice(rng.randrange(POOL_LEN), num_own - len(own))
        units = [*self._slice(0, num_shared), *own, *rest]
        if self.vocabulary.ids:
            return cast(list[int], units)
        return " " + " ".join(cast(list[str], units))

    def _slice(self, start: int, length: int) -> list[str | int]:
        """length units of the pool from start on, around its end as often as it takes."""
        units: list[str | int] = []
        while len(units) < length:
            piece = self._pool[start : start + length - len(units)]
            units.extend(piece)
            start = (start + len(piece)) % POOL_LEN
        return units


def vocabulary_of_file(path: Path, as_ids: bool) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json, or of the directory that holds it.

    Raises:
        ValueError: If it cannot be read, or has too few whole words.
    """
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - optional, and slow to import.
    except ImportError as error:
        raise ValueError("--tokenizer needs the package tokenizers: install legato[load]") from error
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises plain Exception for a missing or broken file.
        raise ValueError(f"--tokenizer {path}: {error}") from error

    def count(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    if as_ids:
        ids = [index for index in range(tokenizer.get_vocab_size()) if index not in special]
        return Vocabulary(ids=tuple(ids), source=f"ids of {file.name}")
    marks = ("\u0120", "\u2581")  # How byte-level BPE and SentencePiece write a leading space.
    bare = sorted(token[1:] for token in tokenizer.get_vocab() if token[:1] in marks)
    candidates = [word for word in bare if word.isascii() and word.isalpha() and word.islower() and len(word) >= 3]
    random.Random(0).shuffle(candidates)
    return _checked(candidates[:MAX_VOCABULARY_WORDS] or list(WORDS), count, f"words of {file.name}")


async def vocabulary_of_server(client: Client, model: str, as_ids: bool, vocab_size: int | None) -> Vocabulary:
    """Return words checked against the server's /tokenize; where it has none, words taken on trust.

    Raises:
        ValueError: If ids are wanted and nobody said how many the vocabulary has.
        RequestFailed: If the server cannot be reached.
    """
    if as_ids:
        if vocab_size is None:
            raise ValueError("--prompt-kind ids needs --tokenizer, or --vocab-size")
        first = min(1000, vocab_size // 2)  # Special tokens lie first in most vocabularies.
        return Vocabulary(ids=tuple(range(first, vocab_size)), source=f"ids {first} to {vocab_size - 1}")
    try:
        once = await _count(client, model, " " + WORDS[0])
        num_added = 2 * once - await _count(client, model, (" " + WORDS[0]) * 2)
        good = list(WORDS)
        if await _count(client, model, " " + " ".join(WORDS)) != num_added + len(WORDS):
            good = [word for word in WORDS if await _is_one_token(client, model, word, num_added)]
    except ValueError:
        return Vocabulary(words=WORDS, is_exact=False, source="words taken as one token each")
    if len(good) < 16:
        return Vocabulary(words=WORDS, is_exact=False, source="words taken as one token each")
    return Vocabulary(words=tuple(good), num_added=num_added, source="words checked with /tokenize")


async def _is_one_token(client: Client, model: str, word: str, num_added: int) -> bool:
    return await _count(client, model, (" " + word) * TOKENIZE_REPEATS) == num_added + TOKENIZE_REPEATS


class _TokenizeAnswer(msgspec.Struct):
    """vLLM and Legato say count; llama.cpp lists tokens."""

    count: int | None = None
    tokens: list[object] | None = None


async def _count(client: Client, model: str, text: str) -> int:
    # "content" is what llama.cpp calls the prompt; servers that refuse unknown fields get the other form alone.
    for body in ({"model": model, "prompt": text}, {"content": text, "add_special": True}):
        answer = await client.call("POST", "/tokenize", msgspec.json.encode(body))
        if answer.status != 200:
            continue
        try:
            parsed = msgspec.json.decode(answer.body, type=_TokenizeAnswer)
        except msgspec.DecodeError:
            continue
        count = parsed.count if parsed.count is not None else len(parsed.tokens or ())
        if count > 0:
            return count
    raise ValueError("no usable /tokenize")


def _checked(candidates: list[str], count: Callable[[str], int], source: str) -> Vocabulary:
    """Keep the words that stay one token each in any company."""
    # Twice one copy less two copies: whatever does not double is added once per text.
    num_added = 2 * count(" " + WORDS[0]) - count((" " + WORDS[0]) * 2)
    words = [word for word in candidates if count((" " + word) * TOKENIZE_REPEATS) == num_added + TOKENIZE_REPEATS]
    if len(words) < 16:
        raise ValueError(f"only {len(words)} of {len(candidates)} words of this tokenizer are one token each")
    # Words that are one token alone can still merge with a neighbour; a long mix shows it.
    sample = random.Random(1).choices(words, k=512)
    if count(" " + " ".join(sample)) != num_added + len(sample):
        raise ValueError("this tokenizer joins words; use --prompt-kind ids")
    return Vocabulary(words=tuple(words), num_added=num_added, source=source)
