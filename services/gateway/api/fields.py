"""Fields of OpenAI's API that Legato does not act on: those it may ignore, and those it must refuse.

A field that would change the output is never ignored in silence. It passes with its neutral value, because many
clients send all the fields they know; any other value is a 400 that names the field.
"""

from collections.abc import Callable
from typing import Any

from services.gateway.errors import bad_request, shown

HARMLESS = frozenset(
    {
        "metadata",  # for the caller's own bookkeeping
        "parallel_tool_calls",  # says nothing while there are no tools
        "prompt_cache_key",  # a routing hint
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Accepted with any value, and without effect."""


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def _is_text_format(value: Any) -> bool:
    return value is None or value == {"type": "text"}


def _is_no_tool(value: Any) -> bool:
    return value is None or value in ("none", "auto")


def _is_text_only(value: Any) -> bool:
    return value is None or value == ["text"]


def _is_null(value: Any) -> bool:
    return value is None


NEUTRAL_IN_COMPLETIONS: dict[str, Callable[[Any], bool]] = {
    "suffix": _is_empty,
}

NEUTRAL_IN_CHAT: dict[str, Callable[[Any], bool]] = {
    "audio": _is_null,
    "function_call": _is_no_tool,
    "functions": _is_empty,
    "modalities": _is_text_only,
    "prediction": _is_null,
    "reasoning_effort": _is_null,
    "response_format": _is_text_format,
    "tool_choice": _is_no_tool,
    "tools": _is_empty,
    "verbosity": _is_null,
    "web_search_options": _is_null,
}
"""Fields that are not supported yet, with the values that ask for nothing."""


def without_unused(body: dict[str, Any], neutral: dict[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """Return body without the fields that Legato does not act on.

    Raises:
        ApiError: 400, if one of them asks for something.
    """
    kept = {}
    for name, value in body.items():
        if (is_neutral := neutral.get(name)) is not None:
            if not is_neutral(value):
                raise bad_request(
                    f"{name} is not supported here yet; it was {shown(value)}", param=name, code="unsupported_parameter"
                )
        elif name not in HARMLESS:
            kept[name] = value
    return kept
