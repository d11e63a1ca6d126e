"""What a GGUF file says of its tokenizer, and the tokenizer built from it.

Reads the metadata alone, through common.gguf: 49k tokens and their merges take a tenth of a second.
"""

import mmap
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from common.gguf import DamagedGguf, read_head
from services.tokenizer.text.errors import UnusableTokenizer

_CONTROL, _USER_DEFINED = 3, 4
"""Values of tokenizer.ggml.token_type: special tokens, and added tokens that are plain text."""

_SPLITS_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
_KEEPS_NUMBERS = {"gpt-2", "gpt2", "default", "mpt", "olmo", "jais"}
"""Values of tokenizer.ggml.pre whose rule is GPT-2's, the first set with every digit on its own. llama.cpp has the
same two groups. Other rules need expressions of their own; a wrong one costs quality unseen, so they are refused."""


def read_metadata(path: Path, prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the metadata whose key begins with one of prefixes.

    Raises:
        OSError: If the file cannot be read.
        UnusableTokenizer: If it is no GGUF file of a known version, or ends within its metadata.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read_head(data, lambda key: key.startswith(prefixes)).metadata
    except (DamagedGguf, ValueError) as error:  # ValueError: an empty file cannot be mapped.
        raise UnusableTokenizer(f"{path}: its GGUF metadata is damaged or of an unknown kind: {error}") from error


def tokenizer_from_metadata(metadata: dict[str, Any]) -> Tokenizer:
    """Build the byte-level BPE tokenizer that tokenizer.ggml.* describes.

    Raises:
        UnusableTokenizer: If it describes another kind.
    """
    kind, rule = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise UnusableTokenizer(f"GGUF tokenizer {kind!r}: only byte-level BPE ('gpt2') is read from GGUF files")
    if rule not in _SPLITS_DIGITS | _KEEPS_NUMBERS:
        known = ", ".join(sorted(_SPLITS_DIGITS | _KEEPS_NUMBERS))
        raise UnusableTokenizer(f"GGUF pre-tokenizer {rule!r} is not known (known: {known}): use the model's directory")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    token_ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(token_ids) != len(tokens):
        raise UnusableTokenizer(f"GGUF vocabulary: {len(tokens) - len(token_ids)} tokens are there twice")
    merges = [(left, right) for left, right in (line.split(" ") for line in metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab=token_ids, merges=merges))
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=metadata.get("tokenizer.ggml.add_space_prefix", False))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if rule in _SPLITS_DIGITS else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, bytes_alone])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens(_added(tokens, types, {_CONTROL}, is_special=True))
    tokenizer.add_tokens(_added(tokens, types, {_USER_DEFINED}, is_special=False))
    _add_ends(tokenizer, metadata, tokens)
    return tokenizer


def _added(tokens: list[str], types: list[int], wanted: Collection[int], *, is_special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=is_special, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in wanted
    ]


def _add_ends(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Have the tokenizer begin and end texts with the tokens that the flags ask for."""
    ends = {}
    for end, key in (("bos", "add_bos_token"), ("eos", "add_eos_token")):
        if metadata.get(f"tokenizer.ggml.{key}", False):
            token_id: int = metadata[f"tokenizer.ggml.{end}_token_id"]
            ends[end] = (tokens[token_id], token_id)
    if ends:
        before = [ends["bos"][0]] if "bos" in ends else []
        after = [ends["eos"][0]] if "eos" in ends else []
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", "$B", *after], special_tokens=list(set(ends.values()))
        )
