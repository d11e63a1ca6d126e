"""Server-sent events of an OpenAI-compatible stream, taken apart cheaply as they come."""

from typing import Any

import msgspec

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""The longest event accepted."""

DONE = b"[DONE]"


class BadEvent(Exception):
    """The stream holds something that is no event of an OpenAI-compatible server."""


class EventSplitter:
    """Cuts a byte stream into the data of its events. Lines end in LF or CRLF; comments (heartbeats) are skipped."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that these bytes complete.

        Raises:
            BadEvent: If one grows beyond MAX_EVENT_BYTES.
        """
        lines = (self._tail + data if self._tail else data).split(b"\n")
        self._tail = lines.pop()
        if len(self._tail) > MAX_EVENT_BYTES:
            raise BadEvent(f"an event of more than {MAX_EVENT_BYTES} bytes")
        events: list[bytes] = []
        for line in lines:
            text = line[:-1] if line.endswith(b"\r") else line
            if text.startswith(b"data:"):
                self._data.append(text[6:] if text.startswith(b"data: ") else text[5:])
            elif not text and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data.clear()
        return events


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None  # what a model thinks aloud is tokens too
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Payload(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Payload)


class StreamEvent(msgspec.Struct, frozen=True, gc=False):
    """What one event says about tokens."""

    text: str
    num_tokens: int  # token ids that came with it; 0 where the server sends none
    may_hold_token: bool  # not so the event that opens a chat, and the closing one that holds usage alone
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None  # so far, in servers that tell with every event
    is_error: bool


def parse_event(data: bytes) -> StreamEvent:
    """Return the meaning of one event's data, other than DONE.

    Raises:
        BadEvent: If it is no JSON object of the expected shape.
    """
    try:
        payload = _decoder.decode(data)
    except msgspec.DecodeError as error:  # Not the data itself: it may hold completion text.
        raise BadEvent(f"an event of {len(data)} bytes that is no completion chunk") from error
    choice = payload.choices[0] if payload.choices else None
    usage = payload.usage
    return StreamEvent(
        text=_text_of(choice) if choice else "",
        num_tokens=len(choice.token_ids) if choice and choice.token_ids else 0,
        may_hold_token=choice is not None and not (choice.delta and choice.delta.role),
        finish_reason=(choice.finish_reason or "") if choice else "",
        prompt_tokens=usage.prompt_tokens if usage else None,
        completion_tokens=usage.completion_tokens if usage else None,
        is_error=payload.error is not None,
    )


def _text_of(choice: _Choice) -> str:
    if choice.text:
        return choice.text
    delta = choice.delta
    if delta is None:
        return ""
    return delta.content or delta.reasoning_content or delta.reasoning or ""
