"""Chat messages into one text, by the model's own template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.tokenizer.text.errors import EncodeError, UnusableTokenizer

MAX_DETAIL_CHARS = 300
"""Of a template's own complaint, which goes to the client."""

_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What expressions of a template raise on values that they were not written for."""


class ChatTemplate:
    """A compiled template, in a sandbox: it computes a text, bounded in size, and reaches nothing else.

    Settings and helpers are those of transformers, which templates are written against.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str], max_chars: int) -> None:
        """named_tokens are what the template may use of bos_token, eos_token and the like.

        Raises:
            UnusableTokenizer: If source is no Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UnusableTokenizer(f"the chat template does not compile: {error}") from error
        self._named_tokens = dict(named_tokens)
        self._max_chars = max_chars

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return the text of the messages.

        Raises:
            EncodeError: If the template refuses them or fails on them, or the text would be larger than max_chars.
        """
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._named_tokens,
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise EncodeError(f"the chat template makes more than {self._max_chars} characters of the messages")
        except _TEMPLATE_FAILURES as error:
            detail = str(error)[:MAX_DETAIL_CHARS]
            raise EncodeError(f"the chat template does not accept these messages: {detail}") from error
        return "".join(pieces)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, and models have never seen that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
