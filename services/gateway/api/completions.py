"""The body of /v1/completions."""

from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from common.ids import pack_ids
from common.messages.requests import IdsPrompt, TextPrompt
from services.gateway.api.fields import NEUTRAL_IN_COMPLETIONS, without_unused
from services.gateway.api.generation import INT32_MAX, GenerationBody, check_generation, parse
from services.gateway.errors import bad_request, shown

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
MAX_LOGPROBS = 5
MAX_STREAMS = 512
"""Choices of all prompts of one call: half of what a link between processes takes at once."""
"""OpenAI's bound on alternatives here; chat has its own."""


class TokenIds(NamedTuple):
    """A list of token ids, ready to travel."""

    packed: bytes  # pack_ids
    max_id: int  # -1 of an empty list

    def check_vocabulary(self, vocab_size: int, param: str) -> None:
        """
        Raises:
            ApiError: 400, if an id lies outside the vocabulary.
        """
        check_vocabulary(self.max_id, vocab_size, param)


def check_vocabulary(max_id: int, vocab_size: int, param: str) -> None:
    """
    Raises:
        ApiError: 400, if the largest of some ids lies outside the vocabulary.
    """
    if max_id >= vocab_size:
        raise bad_request(
            f"{param} has token id {max_id}; this model's vocabulary has {vocab_size} tokens",
            param=param,
            code="invalid_value",
        )


def _checked_prompt(value: Any) -> Any:
    """Type-check a prompt by hand: a union's errors would name every shape that it is not."""
    if isinstance(value, str):
        if not value:
            raise ValueError("it is empty")
        return value
    if not isinstance(value, list):
        raise ValueError(
            f"it must be a string, a list of strings, a list of token ids or a list of such; it was {shown(value)}"
        )
    if not value:
        raise ValueError("it is empty")
    if type(value[0]) is int:
        return as_token_ids(value)
    prompts = [_checked_one(prompt, index) for index, prompt in enumerate(value)]
    if len({type(prompt) for prompt in prompts}) > 1:
        raise ValueError("it mixes strings and token ids")
    return prompts


def _checked_one(prompt: Any, index: int) -> str | TokenIds:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        try:
            return as_token_ids(prompt)
        except ValueError as error:
            raise ValueError(f"entry {index}: {error}") from None
    if prompt in ("", []):
        raise ValueError(f"entry {index} is empty")
    raise ValueError(f"entry {index} must be a string or a list of token ids; it was {shown(prompt)}")


def as_token_ids(value: list[Any]) -> TokenIds:
    """Return a JSON list as token ids: a few milliseconds at 128k of them.

    Raises:
        ValueError: If an entry is no integer, or outside [0, 2**31).
    """
    if set(map(type, value)) - {int}:  # Exact types: a bool is an int to isinstance.
        wrong = next(index for index, item in enumerate(value) if type(item) is not int)
        raise ValueError(f"token id {wrong} must be an integer; it was {shown(value[wrong])}")
    max_id = max(value, default=-1)
    if max_id > INT32_MAX or min(value, default=0) < 0:
        wrong = next(index for index, item in enumerate(value) if not 0 <= item <= INT32_MAX)
        raise ValueError(f"token id {wrong} is {shown(value[wrong])}; ids are from 0 to {INT32_MAX}")
    return TokenIds(pack_ids(value), max_id)


def _off_as_none(value: Any) -> Any:
    """False asks for nothing, as many clients send it: chat's logprobs is a switch. 0 asks for the token's own."""
    return None if value is False else value


class CompletionBody(GenerationBody):
    prompt: Annotated[Any, AfterValidator(_checked_prompt)]  # str | TokenIds | list of either
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int | None, BeforeValidator(_off_as_none)] = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def has_echo(self) -> bool:
        return bool(self.echo)

    @property
    def bounded_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self, vocab_size: int) -> tuple[TextPrompt | IdsPrompt, ...]:
        """The prompts as messages.

        Raises:
            ApiError: 400, if a token id lies outside the vocabulary.
        """
        several = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        prompts: list[TextPrompt | IdsPrompt] = []
        for prompt in several:
            if isinstance(prompt, TokenIds):
                prompt.check_vocabulary(vocab_size, "prompt")
                prompts.append(IdsPrompt(token_ids=prompt.packed))
            else:
                prompts.append(TextPrompt(text=prompt))
        return tuple(prompts)


def parse_completion(body: dict[str, Any], *, max_choices: int, max_prompts: int) -> CompletionBody:
    """Return the checked body.

    Raises:
        ApiError: 400, naming the field at fault.
    """
    completion = parse(CompletionBody, without_unused(body, NEUTRAL_IN_COMPLETIONS))
    check_generation(completion, max_choices)
    if completion.best_of is not None and completion.best_of != completion.num_choices:
        raise bad_request(
            f"best_of is {shown(completion.best_of)} and n is {completion.num_choices}; a best_of that differs from n "
            "is not supported here yet",
            param="best_of",
            code="unsupported_parameter",
        )
    if isinstance(completion.prompt, list) and len(completion.prompt) > max_prompts:
        raise bad_request(
            f"prompt holds {len(completion.prompt)} prompts; this server allows at most {max_prompts}", param="prompt"
        )
    num_prompts = len(completion.prompt) if isinstance(completion.prompt, list) else 1
    num_streams = num_prompts * completion.num_choices
    if num_streams > MAX_STREAMS:
        raise bad_request(
            f"{num_prompts} prompts with n {completion.num_choices} are {num_streams} choices; "
            f"one call may have {MAX_STREAMS}",
            param="n",
        )
    return completion
