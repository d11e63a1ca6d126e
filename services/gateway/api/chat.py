"""The body of /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from common.messages.logprobs import MAX_TOP
from common.messages.requests import ChatPrompt
from services.gateway.api.fields import NEUTRAL_IN_CHAT, without_unused
from services.gateway.api.generation import INT32_MAX, Body, GenerationBody, check_generation, parse
from services.gateway.errors import bad_request, shown

MAX_NAME_CHARS = 64


def _joined_content(value: Any) -> Any:
    """Return content as one string: a list of text parts is joined as it stands, with nothing between."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"it must be a string or a list of text parts; it was {shown(value)}")
    return "".join(_text_of(part, index) for index, part in enumerate(value))


def _text_of(part: Any, index: int) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError(f"part {index} must be an object with a type; it was {shown(part)}")
    if part["type"] != "text":
        raise ValueError(f"part {index} is of type {shown(part['type'])}; this model takes only text")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"part {index}: text must be a string; it was {shown(text)}")
    if unknown := sorted(part.keys() - {"type", "text"}):
        raise ValueError(f"part {index} has an unknown field: {shown(unknown[0])}")
    return text


def _asks_nothing(value: Any) -> Any:
    if value not in (None, [], {}, ""):
        raise ValueError("it is not supported here yet")
    return value


Neutral = Annotated[Any, AfterValidator(_asks_nothing)]


class ChatMessage(Body):
    """One message. The fields at the end come with messages that a client got from an API and sends back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(_joined_content)]  # str
    name: str | None = Field(default=None, max_length=MAX_NAME_CHARS)
    tool_call_id: str | None = Field(default=None, max_length=256)
    annotations: Neutral = None
    audio: Neutral = None
    function_call: Neutral = None
    refusal: Neutral = None
    tool_calls: Neutral = None

    def plain(self) -> dict[str, Any]:
        """The message as a chat template takes it. A developer's message is what templates know as a system one."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatBody(GenerationBody):
    # Only the first error is told, and each costs time to make.
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)

    @property
    def bounded_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt(self) -> ChatPrompt:
        return chat_prompt(self.messages)


def chat_prompt(messages: list[ChatMessage], *, add_generation_prompt: bool = True) -> ChatPrompt:
    """The messages as a prompt."""
    return ChatPrompt(
        messages=tuple(message.plain() for message in messages), add_generation_prompt=add_generation_prompt
    )


def parse_chat(body: dict[str, Any], *, max_choices: int) -> ChatBody:
    """Return the checked body.

    Raises:
        ApiError: 400, naming the field at fault.
    """
    chat = parse(ChatBody, without_unused(body, NEUTRAL_IN_CHAT))
    check_generation(chat, max_choices)
    if None not in (chat.max_tokens, chat.max_completion_tokens) and chat.max_tokens != chat.max_completion_tokens:
        raise bad_request(
            f"max_tokens is {chat.max_tokens} and max_completion_tokens is {chat.max_completion_tokens}; "
            "they are two names of one bound",
            param="max_tokens",
        )
    if chat.top_logprobs and not chat.logprobs:
        raise bad_request(
            "The 'logprobs' parameter must be enabled when 'top_logprobs' is used.",
            param="top_logprobs",
            code="invalid_value",
        )
    return chat
