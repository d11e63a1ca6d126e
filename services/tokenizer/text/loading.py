"""The tokenizer and chat template of a model, from whichever files it comes in."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from common.models import ModelFiles
from services.tokenizer.text.errors import UnusableTokenizer
from services.tokenizer.text.gguf import read_metadata, tokenizer_from_metadata

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What a model brings along."""

    tokenizer: Tokenizer
    chat_template: str | None
    named_tokens: dict[str, str]  # bos_token and the like, which templates may name


def load_tokenizer(model: ModelFiles, chat_template: Path | None = None) -> TokenizerFiles:
    """Read a model's tokenizer; its chat template from chat_template, where given.

    Raises:
        OSError: If a file is missing, unreadable or of an unknown kind; UnusableTokenizer is one.
    """
    if model.gguf is not None:
        files = _load_gguf(model.gguf)
    else:
        assert model.directory is not None, "a model is a GGUF file or a directory"
        files = _load_directory(model.directory)
    if chat_template is not None:
        return TokenizerFiles(
            tokenizer=files.tokenizer, chat_template=chat_template.read_text("utf-8"), named_tokens=files.named_tokens
        )
    return files


def _load_gguf(path: Path) -> TokenizerFiles:
    metadata = read_metadata(path, ("tokenizer.",))
    tokenizer = tokenizer_from_metadata(metadata)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
    return TokenizerFiles(
        tokenizer=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        named_tokens={name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
    )


def _load_directory(directory: Path) -> TokenizerFiles:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UnusableTokenizer(f"{directory} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower.
        raise UnusableTokenizer(f"{path}: {error}") from error
    tokenizer.no_padding()  # Training leftovers: a server neither pads nor cuts what clients send.
    tokenizer.no_truncation()
    config = _read_json(directory / "tokenizer_config.json")
    named = {**_read_json(directory / "special_tokens_map.json"), **config}
    return TokenizerFiles(
        tokenizer=tokenizer,
        chat_template=_template_of(directory, config),
        named_tokens={name: text for name in _NAMED_TOKENS if (text := _token_text(named.get(name))) is not None},
    )


def _template_of(directory: Path, config: dict[str, Any]) -> str | None:
    """The newest of the three places in which a template may be; of several templates, the one named default."""
    if (path := directory / "chat_template.jinja").is_file():
        return path.read_text("utf-8")
    template = _read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise UnusableTokenizer(f"{directory}: chat_template is neither text nor a list of named texts")
    return template


def _token_text(token: Any) -> str | None:
    """Tokens are written as text, or as a map with their text in "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableTokenizer(f"{path}: {error}") from error
