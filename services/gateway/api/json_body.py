"""From bytes to a JSON object, strictly: what the standard does not allow, or a later step could not hold, is refused.

NaN and Infinity, invalid UTF-8, lone surrogates (raw or escaped) and trailing characters are errors of msgspec's
decoder already. Of duplicate keys the last one counts, as in every common decoder.
"""

import re
from typing import Any

import msgspec

from services.gateway.errors import bad_request

MAX_NESTING = 64
"""Levels of objects and arrays in one body. A chat needs five; metadata may be what its owner likes."""
MAX_CONTAINERS = 20_000
"""Objects and arrays in one body: what checking them costs is time in which this process does little else. A chat of
thousands of messages stays below it, and a list of token ids is one, however long."""

# A string, or what is left of a body whose last string does not end: so that the search never starts over inside one.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_HALF_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that body holds.

    Raises:
        ApiError: 400, if body is no JSON object, nested too deeply, or made of too many parts.
    """
    if not body:
        raise bad_request("the request body is empty; it must be a JSON object", code="invalid_json")
    num_brackets = body.count(b"[") + body.count(b"{")
    if num_brackets > MAX_CONTAINERS:
        # Those in strings cost nothing: code has many. The others are counted before they are made.
        structure = _STRING.sub(b"", body)
        if structure.count(b"[") + structure.count(b"{") > MAX_CONTAINERS:
            raise bad_request(f"the body holds more than {MAX_CONTAINERS} objects and arrays", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        # Raised from the decoder's own depth check, so the stack is as it was.
        raise bad_request(f"the body is nested deeper than {MAX_NESTING} levels", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as error:
        hint = " (is a \\u escape half of a surrogate pair?)" if _HALF_ESCAPE.search(body) else ""
        raise bad_request(f"the body is not valid JSON: {error}{hint}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {_kind_of(value)}", code="invalid_json")
    # So few brackets cannot nest too deeply; a long list of token ids is not walked.
    if num_brackets > MAX_NESTING:
        _check_nesting(value)
    return value


def _check_nesting(value: Any) -> None:
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise bad_request(f"the body is nested deeper than {MAX_NESTING} levels", code="invalid_json")
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, (dict, list))
        ]


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names[type(value)]
