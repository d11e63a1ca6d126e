"""The bodies of /tokenize and /detokenize."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from common.messages.requests import ChatPrompt, TextPrompt
from services.gateway.api.chat import ChatMessage, chat_prompt
from services.gateway.api.completions import as_token_ids
from services.gateway.api.generation import MAX_MODEL_CHARS, Body, parse
from services.gateway.errors import bad_request, shown


def _checked_ids(value: Any) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"it must be a list of token ids; it was {shown(value)}")
    return as_token_ids(value)


class TokenizeBody(Body):
    """Either prompt or messages. Without a model, the only one there is."""

    model: str | None = Field(default=None, min_length=1, max_length=MAX_MODEL_CHARS)
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    def text_or_chat(self) -> TextPrompt | ChatPrompt:
        if self.messages is not None:
            return chat_prompt(self.messages, add_generation_prompt=self.add_generation_prompt is not False)
        assert self.prompt is not None, "parse_tokenize saw to it"
        return TextPrompt(text=self.prompt)


class DetokenizeBody(Body):
    model: str | None = Field(default=None, min_length=1, max_length=MAX_MODEL_CHARS)
    tokens: Annotated[Any, AfterValidator(_checked_ids)]  # TokenIds


def parse_tokenize(body: dict[str, Any]) -> TokenizeBody:
    """Return the checked body.

    Raises:
        ApiError: 400, naming the field at fault.
    """
    tokenize = parse(TokenizeBody, body)
    if (tokenize.prompt is None) == (tokenize.messages is None):
        raise bad_request("exactly one of prompt and messages is required", param="prompt")
    return tokenize


def parse_detokenize(body: dict[str, Any]) -> DetokenizeBody:
    """Return the checked body.

    Raises:
        ApiError: 400, naming the field at fault.
    """
    return parse(DetokenizeBody, body)
