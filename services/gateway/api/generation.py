"""What completions and chat have in common: sampling, bounds, stops, targets."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from common.messages.requests import Sampling
from services.gateway.errors import ApiError, bad_request, shown

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Length of one stop string. The tokenizer holds back as much text as a stop string may still need."""
MAX_STOP_IDS = 64
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100
MAX_SALT_CHARS = 256
MAX_MODEL_CHARS = 256
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

BodyT = TypeVar("BodyT", bound="Body")


def _as_stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_stop_list),
]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Milliseconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


def _checked_bias(value: Any) -> Any:
    """Check `logit_bias` by hand: its keys are numbers in strings, and OpenAI's errors name the key."""
    if not isinstance(value, dict):
        raise ValueError(f"it must be an object that maps token ids to biases; it was {shown(value)}")
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"it has {len(value)} tokens; the most is {MAX_BIASED_TOKENS}")
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and str(int(key)) == key and int(key) <= INT32_MAX):
            raise ValueError(f"invalid key {shown(key)}: you should only be submitting non-negative integers")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"invalid value {shown(bias)} for key {key}: it must be from -{MAX_BIAS} to {MAX_BIAS}")
    return value


LogitBias = Annotated[Any, AfterValidator(_checked_bias)]  # dict[str, float]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class Body(BaseModel):
    """A request body: types are taken at their word (no "1" for 1, no true for 1), unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's extension, which load generators ask for: usage in every event
    include_obfuscation: bool | None = None  # Harmless: padding against eavesdroppers on OpenAI's own links.


class Slo(Body):
    """The time targets of one request (an extension)."""

    tbt_ms: Milliseconds | None = None
    ttft_ms: Milliseconds | None = None
    class_: Literal["interactive", "standard", "batch"] | None = Field(default=None, alias="class")


class GenerationBody(Body):
    """Fields that /v1/completions and /v1/chat/completions share. Null means absent everywhere."""

    model: str = Field(min_length=1, max_length=MAX_MODEL_CHARS)
    max_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    min_tokens: int | None = Field(default=None, ge=0, le=INT32_MAX)
    n: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=INT64_MIN, le=INT64_MAX)
    stop: StopStrings | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_IDS)
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=2, allow_inf_nan=False)
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions
    slo: Slo | None = None
    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX)
    deadline_ms: Milliseconds | None = None
    cache_salt: str | None = Field(default=None, max_length=MAX_SALT_CHARS)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return (
            self.includes_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    @property
    def bounded_tokens(self) -> int | None:
        """Output tokens at most; None: to the end of the context."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives that output tokens are scored with; None: they are not scored."""
        raise NotImplementedError

    @property
    def has_echo(self) -> bool:
        """Whether the prompt comes before the output."""
        return False

    @property
    def max_biased_id(self) -> int:
        """The largest token id in logit_bias; -1 of none."""
        return max(map(int, self.logit_bias or ()), default=-1)

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),  # -1 and 0 both keep all tokens, as vLLM's clients expect.
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple((int(token_id), float(bias)) for token_id, bias in (self.logit_bias or {}).items()),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_logprobs if self.has_echo else None,
        )


MAX_FIELDS = 256
"""Of a body. Each unknown one is an error that is made, while streams wait, though only the first is told."""


def parse(body_type: type[BodyT], body: dict[str, Any]) -> BodyT:
    """Return body as body_type.

    Raises:
        ApiError: 400, naming the first field at fault.
    """
    if len(body) > MAX_FIELDS:
        raise bad_request(f"the body has {len(body)} fields; no request has more than {MAX_FIELDS}")
    try:
        return body_type.model_validate(body)
    except ValidationError as error:
        raise _as_api_error(error.errors(include_url=False, include_context=True)[0]) from None


def check_generation(body: GenerationBody, max_choices: int) -> None:
    """Check what lies between fields, and the operator's bounds.

    Raises:
        ApiError: 400, with both values.
    """
    if body.num_choices > max_choices:
        raise bad_request(f"n is {shown(body.n)}; this server allows at most {max_choices}", param="n")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is allowed only with stream: true", param="stream_options")
    bound = body.bounded_tokens
    if bound is not None and (body.min_tokens or 0) > bound:
        raise bad_request(
            f"min_tokens is {body.min_tokens}; it must not be above max_tokens, {bound}", param="min_tokens"
        )


def _as_api_error(error: ErrorDetails) -> ApiError:
    param = _path_of(error["loc"])
    match error["type"]:
        case "extra_forbidden":
            name = param if len(param) <= 60 else param[:60] + "…"
            return bad_request(f"unknown field: {name}", param=name, code="unknown_parameter")
        case "missing":
            return bad_request(f"{param} is required", param=param, code="missing_required_parameter")
        case "value_error":
            # Raised by a validator of ours: the message is complete.
            return bad_request(f"{param}: {error['ctx']['error']}", param=param, code="invalid_value")
        case _:
            return bad_request(
                f"{param}: {error['msg'][:1].lower()}{error['msg'][1:]}; it was {shown(error['input'])}",
                param=param,
                code="invalid_value",
            )


def _path_of(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path
