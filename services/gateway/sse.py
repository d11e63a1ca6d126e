"""Events of a stream, as bytes. What is constant in a chunk is serialised once per choice."""

from collections.abc import Iterable
from typing import Any

import msgspec

from common.messages.logprobs import TokenLogprob
from services.gateway.api.logprobs import chat_logprobs, completion_logprobs
from services.gateway.calls import Call, Stream, TokenCounts
from services.gateway.errors import ApiError

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": keep-alive\n\n"
"""A comment: readers skip it, proxies see that the connection lives."""

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold chunks back otherwise
}

FINISH_WORDS = {"stop": "stop", "length": "length"}

# Valid in JSON and in SSE, yet many readers split lines there (Python's str.splitlines is how several clients do it).
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def json_of(value: Any) -> bytes:
    """Return a value as JSON that no reader takes for several lines."""
    encoded = msgspec.json.encode(value)
    return encoded if encoded.isascii() else encoded.decode().translate(_LINE_BREAKS).encode()


class EventWriter:
    """Turns what has happened to a call into the bytes of its stream."""

    def __init__(
        self,
        call: Call,
        *,
        model: str,
        created: int,
        is_chat: bool,
        includes_usage: bool,
        has_continuous_usage: bool = False,
    ) -> None:
        """includes_usage adds an event with the call's usage; has_continuous_usage tells it in every event as well, of
        the event's own choice so far."""
        self._call = call
        self._is_chat = is_chat
        self._includes_usage = includes_usage
        self._has_continuous_usage = has_continuous_usage
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = msgspec.json.encode({"id": call.call_id, "object": kind, "created": created, "model": model})[:-1]
        usage = b',"usage":null' if includes_usage else b""
        self._head = b"data: " + head + b',"choices":['
        self._tail = b"]" + usage + b"}\n\n"
        opening = b',"delta":{"content":' if is_chat else b',"text":'
        self._prefixes = [self._head + b'{"index":%d' % stream.index + opening for stream in call.streams]
        self._closing = (
            b'},"logprobs":null,"finish_reason":null}' if is_chat else b',"logprobs":null,"finish_reason":null}'
        )
        self._suffix = self._closing + self._tail
        self._has_role: set[int] = set()  # chat choices whose first delta, with the role, is written

    def render(self, fresh: Iterable[Stream]) -> bytes:
        """The events for what these streams have now; of a call that is over, the last ones too."""
        parts: list[bytes] = []
        for stream in fresh:
            text, logprobs = stream.take_text(), stream.take_logprobs()
            if text or logprobs:
                if self._is_chat and stream.index not in self._has_role:
                    parts.append(self._role(stream.index))
                if logprobs or self._has_continuous_usage:
                    suffix = self._closing_with(logprobs) + self._tail_of(stream)
                else:
                    suffix = self._suffix
                parts += (self._prefixes[stream.index], json_of(text), suffix)
            if stream.ended is not None and self._call.failure is None:
                parts.append(self._finish(stream, FINISH_WORDS[stream.ended.reason]))
        if (failure := self._call.failure) is not None:
            parts += (error_event(failure), DONE)
        elif self._call.is_over:
            if self._includes_usage:
                parts.append(self._usage(self._call.counts()))
            parts.append(DONE)
        return b"".join(parts)

    def _role(self, index: int) -> bytes:
        self._has_role.add(index)
        delta = b',"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        return self._head + b'{"index":%d' % index + delta + self._tail

    def _finish(self, stream: Stream, reason: str) -> bytes:
        index = stream.index
        # A choice that ends without any text has its role, too.
        first = self._role(index) if self._is_chat and index not in self._has_role else b""
        content = b',"delta":{}' if self._is_chat else b',"text":""'
        ending = b',"logprobs":null,"finish_reason":"%b"}' % reason.encode()
        return first + self._head + b'{"index":%d' % index + content + ending + self._tail_of(stream)

    def _closing_with(self, logprobs: list[TokenLogprob]) -> bytes:
        """The end of a choice with scored tokens. They may come without text, which waits for the rest of a character
        or of a stop string."""
        if not logprobs:
            return self._closing
        rendered = chat_logprobs(logprobs) if self._is_chat else completion_logprobs(logprobs)
        opening = b'},"logprobs":' if self._is_chat else b',"logprobs":'
        return opening + json_of(rendered) + b',"finish_reason":null}'

    def _tail_of(self, stream: Stream) -> bytes:
        """The end of an event of this choice."""
        if not self._has_continuous_usage:
            return self._tail
        counts = TokenCounts(
            num_prompt_tokens=stream.num_prompt_tokens,
            num_output_tokens=stream.num_output_tokens,
            num_cached_tokens=0 if stream.ended is None else stream.ended.num_cached_tokens,
        )
        return b'],"usage":%b}\n\n' % msgspec.json.encode(usage_of(counts))

    def _usage(self, counts: TokenCounts) -> bytes:
        tail = b'],"usage":%b}\n\n' % msgspec.json.encode(usage_of(counts))
        return self._head + tail


def usage_of(counts: TokenCounts) -> dict[str, object]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": counts.num_prompt_tokens,
        "completion_tokens": counts.num_output_tokens,
        "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.num_cached_tokens},
    }


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"
