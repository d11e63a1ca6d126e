"""What a simulated worker must know of a real model: its card, and which of its tokens are plain words.

The tokenizer makes text of what the worker samples. Whole words show at once, where other tokens would not: half a
character is held back until the rest is there, and then the gaps between texts are not those between tokens.
"""

import mmap
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from common.gguf import DamagedGguf, read_head
from common.models import ModelFiles
from gpu_worker.errors import UnusableModel

LEAST_WORDS = 16
"""A vocabulary with fewer plain words is of a kind that we do not know; then every id will do that ends nothing."""
MAX_WORDS = 4096
"""More would only cost memory."""

_WORD = re.compile(r"[\u0120\u2581][a-z]{3,12}")
"""A space, as byte-level BPE and SentencePiece write it, and a short word."""
_WANTED = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "general.architecture")
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model without its weights."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    word_ids: "array[int]"  # ids that are safe to sample: no special token, and text of their own


class _Config(msgspec.Struct):
    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int | list[int] | None = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]  # the list is of Unigram, its indices the ids


class _AddedToken(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []


def read_facts(files: ModelFiles) -> ModelFacts:
    """Read a model's metadata; a tenth of a second for 50,000 tokens.

    Raises:
        OSError: If a file is missing, or not of a kind that we know; UnusableModel is one.
    """
    if files.gguf is not None:
        return _facts_of_gguf(files.name, files.gguf)
    assert files.directory is not None, "ModelFiles has one of gguf and directory"
    return _facts_of_directory(files.name, files.directory)


def _facts_of_gguf(name: str, path: Path) -> ModelFacts:
    metadata = _read_metadata(path)
    architecture = metadata.get("general.architecture")
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        max_model_len = int(metadata[f"{architecture}.context_length"])
    except KeyError as error:
        raise UnusableModel(f"{path}: the GGUF metadata has no {error.args[0]}") from error
    eos_token_ids = tuple(dict.fromkeys(int(metadata[key]) for key in _EOS_KEYS if key in metadata))
    normal = 1  # of tokenizer.ggml.token_type
    kinds = metadata.get("tokenizer.ggml.token_type") or [normal] * len(tokens)
    plain = [(token, index) for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == normal]
    return ModelFacts(name, len(tokens), max_model_len, eos_token_ids, _words(plain, len(tokens), eos_token_ids))


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            head = read_head(data, lambda key: key in _WANTED or key in _EOS_KEYS or key.endswith(".context_length"))
    except (DamagedGguf, ValueError) as error:  # ValueError is mmap's, for an empty file.
        raise UnusableModel(f"{path}: not a readable GGUF file: {error}") from error
    return head.metadata


def _facts_of_directory(name: str, directory: Path) -> ModelFacts:
    config = _parse(directory / "config.json", _Config)
    eos = config.eos_token_id
    if (directory / "generation_config.json").is_file():
        own = _parse(directory / "generation_config.json", _GenerationConfig).eos_token_id
        eos = eos if own is None else own
    eos_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    plain: list[tuple[str, int]] = []
    if (directory / "tokenizer.json").is_file():
        tokenizer = _parse(directory / "tokenizer.json", _Tokenizer)
        vocab = tokenizer.model.vocab
        pairs = vocab.items() if isinstance(vocab, dict) else ((piece, i) for i, (piece, _) in enumerate(vocab))
        added = {token.id for token in tokenizer.added_tokens}
        plain = [(token, token_id) for token, token_id in pairs if token_id not in added]
    words = _words(plain, config.vocab_size, eos_token_ids)
    return ModelFacts(name, config.vocab_size, config.max_position_embeddings, eos_token_ids, words)


def _words(plain: Iterable[tuple[str, int]], vocab_size: int, eos_token_ids: tuple[int, ...]) -> "array[int]":
    allowed = set(range(vocab_size)) - set(eos_token_ids)
    words = sorted(token_id for token, token_id in plain if token_id in allowed and _WORD.fullmatch(token))
    return array("i", (words if len(words) >= LEAST_WORDS else sorted(allowed))[:MAX_WORDS])


def _parse(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:  # Also of a wrong type, or a field that is missing.
        raise UnusableModel(f"{path}: {error}") from error
