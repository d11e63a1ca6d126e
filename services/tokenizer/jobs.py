"""What runs in threads, beside the event loop: encoding prompts, rebuilding streams, and the two calls.

Jobs and their results are values; the core asks for one and gets the other. `run_job` is a pure function of its
arguments (but for a template that asks for today's date).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, assert_never

from common.ids import RequestId, pack_ids, unpack_ids
from common.messages import Decode, Encode, Submit
from common.messages.requests import ChatPrompt, IdsPrompt, TextPrompt
from services.tokenizer.text.echo import Echo, echo_of
from services.tokenizer.text.errors import EncodeError
from services.tokenizer.text.model_tokenizer import ModelTokenizer
from services.tokenizer.text.stream import TextStream

JobId = NewType("JobId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Something to compute for one message of a gateway, with the pool's numbers as they are now."""

    job_id: JobId
    message: Submit | Encode | Decode
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """One choice of a Submit, with what an earlier attempt delivered taken in."""

    stream: TextStream
    output_ids: "array[int]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A Submit's prompt as tokens, and a stream for each of its choices."""

    prompt_ids: "array[int]"
    choices: dict[RequestId, Resumed]
    echo: Echo | None = None  # where it is asked for
    token_bytes: "list[bytes] | None" = None  # of each token id, where tokens are scored


@dataclass(frozen=True, slots=True)
class EncodedIds:
    packed: bytes  # pack_ids
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DecodedText:
    text: str


@dataclass(frozen=True, slots=True)
class Invalid:
    """The client's mistake."""

    detail: str
    param: str


JobResult = Prepared | EncodedIds | DecodedText | Invalid


def run_job(job: Job, model: ModelTokenizer) -> JobResult:
    """Do it. May be called in any thread."""
    message = job.message
    try:
        match message:
            case Submit():
                return _prepare(job, message, model)
            case Encode():
                ids = _encode(message.prompt, model, add_special_tokens=message.add_special_tokens)
                return EncodedIds(pack_ids(ids), len(ids))
            case Decode():
                ids = _unpack(message.token_ids, job.vocab_size)
                return DecodedText(model.decode(ids))
            case _:
                assert_never(message)
    except EncodeError as error:
        return Invalid(str(error), param_of(message))


def param_of(message: Submit | Encode | Decode) -> str:
    """Return the API field that the message's content came from."""
    if isinstance(message, Decode):
        return "tokens"
    return "messages" if isinstance(message.prompt, ChatPrompt) else "prompt"


def _prepare(job: Job, submit: Submit, model: ModelTokenizer) -> JobResult:
    if isinstance(submit.prompt, IdsPrompt):
        prompt_ids = _unpack(submit.prompt.token_ids, job.vocab_size)
    else:
        prompt_ids = _encode(submit.prompt, model, max_tokens=job.max_model_len)
        _check_ids(prompt_ids, job.vocab_size)
    if not prompt_ids:
        raise EncodeError(f"{param_of(submit)} has no tokens; at least 1 is needed")
    silent_ids = model.special_ids.union(submit.sampling.stop_token_ids, job.eos_token_ids)
    choices = {}
    for choice in submit.choices:
        output_ids = _unpack(choice.output_ids, job.vocab_size)
        stream = TextStream(
            model.start_detokenizer(prompt_ids), submit.stop, silent_ids, min_tokens=submit.sampling.min_tokens
        )
        stream.push(output_ids)  # Its text is with the gateway already.
        choices[choice.request_id] = Resumed(stream=stream, output_ids=output_ids)
    sampling = submit.sampling
    is_scored = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    return Prepared(
        prompt_ids=prompt_ids,
        choices=choices,
        echo=_echo(submit, prompt_ids, model) if submit.has_echo else None,
        token_bytes=model.token_bytes if is_scored else None,
    )


def _echo(submit: Submit, prompt_ids: "array[int]", model: ModelTokenizer) -> Echo:
    is_text = isinstance(submit.prompt, TextPrompt)
    return echo_of(
        submit.prompt.text if isinstance(submit.prompt, TextPrompt) else None,
        prompt_ids,
        model.start_detokenizer(()),
        model.special_ids if is_text else frozenset(),
    )


def _encode(
    prompt: TextPrompt | ChatPrompt,
    model: ModelTokenizer,
    *,
    add_special_tokens: bool = True,
    max_tokens: int | None = None,
) -> "array[int]":
    max_chars = None
    if max_tokens is not None and model.max_token_chars is not None:
        # What cannot fit however well it compresses is refused before seconds of work on it.
        max_chars = max_tokens * model.max_token_chars
    match prompt:
        case TextPrompt():
            if max_chars is not None and len(prompt.text) > max_chars:
                detail = (
                    f"prompt has {len(prompt.text)} characters; more than {max_chars} are never {max_tokens} tokens"
                )
                raise EncodeError(f"{detail}, which this model accepts")
            return model.encoder.encode_text(prompt.text, add_special_tokens=add_special_tokens)
        case ChatPrompt():
            return model.encoder.encode_chat(
                prompt.messages, add_generation_prompt=prompt.add_generation_prompt, max_chars=max_chars
            )
        case _:
            assert_never(prompt)


def _unpack(packed: bytes, vocab_size: int) -> "array[int]":
    try:
        ids = unpack_ids(packed)
    except ValueError as error:
        raise EncodeError(f"{len(packed)} bytes are no list of token ids") from error
    _check_ids(ids, vocab_size)
    return ids


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for extreme in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= extreme < vocab_size:
            raise EncodeError(f"token id {extreme} is outside the vocabulary, 0 to {vocab_size - 1}")
