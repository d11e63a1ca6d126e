"""Penalties, biases, log-probabilities and echoes as clients ask for them and see them."""

import json
import math
from typing import Any

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from common.messages.logprobs import TokenLogprob, TopLogprob
from common.messages.requests import PromptDelta, Sampling
from services.gateway.api.generation import MAX_BIASED_TOKENS
from services.gateway.api.logprobs import chat_logprobs, completion_logprobs
from services.gateway.core import CutClient, DropPeer
from services.gateway.http.generation import whole_answer
from tests.services.gateway.test_api import chat, completion, refused
from tests.services.gateway.test_core import A0, A1, Bench, ended
from tests.services.gateway.test_parts import events, written
from tests.services.gateway.world import delta, parsed_events

HALF = b"\xf0\x9f\x92"


def scored(token: bytes, logprob: float | None, offset: int, *top: tuple[bytes, float]) -> TokenLogprob:
    return TokenLogprob(token, logprob, offset, tuple(TopLogprob(*each) for each in top))


def delta_of(first_index: int, text_offset: int, text: str, *logprobs: TokenLogprob) -> Any:
    plain = delta(A0, first_index, text_offset, text, num_tokens=len(logprobs))
    return msgspec.structs.replace(plain, logprobs=logprobs)


HI = scored(b"Hi", -0.5, 0, (b"Hi", -0.5), (b"Ho", -1.5))
PART = scored(HALF, -math.inf, 2, (b"!", -0.25), (HALF, -math.inf))


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (completion, {"presence_penalty": 2.1}, "presence_penalty"),
        (completion, {"presence_penalty": "0"}, "presence_penalty"),
        (completion, {"frequency_penalty": -2.1}, "frequency_penalty"),
        (completion, {"frequency_penalty": False}, "frequency_penalty"),
        (completion, {"repetition_penalty": 0}, "repetition_penalty"),
        (completion, {"repetition_penalty": 2.5}, "repetition_penalty"),
        (completion, {"logit_bias": [5]}, "logit_bias"),
        (completion, {"logit_bias": {"5": 101}}, "logit_bias"),
        (completion, {"logit_bias": {"5": True}}, "logit_bias"),
        (completion, {"logit_bias": {"5": None}}, "logit_bias"),
        (completion, {"logit_bias": {"-5": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"05": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"\u0665": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"2147483648": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        (completion, {"logit_bias": {str(token): 1 for token in range(MAX_BIASED_TOKENS + 1)}}, "logit_bias"),
        (completion, {"logprobs": 6}, "logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"echo": 1}, "echo"),
        (chat, {"logprobs": 1}, "logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"top_logprobs": False}, "top_logprobs"),
        (chat, {"echo": True}, "echo"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(parse: Any, fields: dict[str, Any], param: str) -> None:
    error = refused(parse, **fields)
    assert error.param == param
    assert len(error.message) < 300


def test_what_is_asked_for_becomes_sampling() -> None:
    body = completion(
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.25, logit_bias={"7": -100, "9": 0.5}, logprobs=0
    )
    assert body.sampling() == Sampling(
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.25,
        logit_bias=((7, -100.0), (9, 0.5)),
        logprobs=0,
    )
    assert body.max_biased_id == 9
    assert completion(echo=True, logprobs=5).sampling().prompt_logprobs == 5
    assert completion(echo=True).sampling() == Sampling()
    assert chat(logprobs=True, top_logprobs=20).sampling().logprobs == 20
    assert chat(logprobs=True).sampling().logprobs == 0
    for parse in (completion, chat):
        neutral = parse(logprobs=False, logit_bias={}, presence_penalty=0, frequency_penalty=None, repetition_penalty=1)
        assert neutral.sampling() == Sampling()


def test_a_chat_lists_each_token_with_its_bytes_and_as_many_alternatives_as_asked_for() -> None:
    content = chat_logprobs([HI, PART])["content"]
    assert content[0]["token"] == "Hi"
    assert content[0]["bytes"] == [72, 105]
    assert [(top["token"], top["logprob"]) for top in content[0]["top_logprobs"]] == [("Hi", -0.5), ("Ho", -1.5)]
    assert (content[1]["token"], content[1]["bytes"]) == ("\\xf0\\x9f\\x92", list(HALF))
    assert content[1]["logprob"] == -9999.0, "JSON has no infinity"


def test_a_completion_has_parallel_lists_and_the_token_itself_among_the_alternatives() -> None:
    rare = scored(b"x", -9.0, 2, (b"a", -1.0))
    lists = completion_logprobs([scored(b"Hi", None, 0), rare, PART])
    assert lists == {
        "tokens": ["Hi", "x", "bytes:\\xf0\\x9f\\x92"],
        "token_logprobs": [None, -9.0, -9999.0],
        "top_logprobs": [None, {"a": -1.0, "x": -9.0}, {"!": -0.25, "bytes:\\xf0\\x9f\\x92": -9999.0}],
        "text_offset": [0, 2, 2],
    }
    json.dumps(lists, allow_nan=False)


def test_a_stream_tells_of_tokens_as_they_come_also_while_they_give_no_text() -> None:
    bench = Bench(n=1)
    bench.apply(deltas=[delta_of(0, 0, "Hi", HI)])
    first = written(bench)
    bench.apply(deltas=[delta_of(1, 2, "", PART)])
    second = written(bench)
    assert first[0]["choices"][0]["text"] == "Hi"
    assert first[0]["choices"][0]["logprobs"] == completion_logprobs([HI])
    assert (second[0]["choices"][0]["text"], len(second)) == ("", 1)


def test_a_chat_stream_is_what_openais_client_takes() -> None:
    bench = Bench(n=1)
    writer = events(bench, is_chat=True, includes_usage=True)
    bench.apply(deltas=[delta_of(0, 0, "Hi\u2028", HI, PART)], ended=[ended(A0, 2)])
    *chunks, _, done = parsed_events(writer.render(bench.call.take_fresh()).decode())
    assert done == "[DONE]"
    parsed = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]
    told = [chunk.choices[0].logprobs for chunk in parsed]
    assert [len(each.content or ()) if each else 0 for each in told] == [0, 2, 0]


def test_tokens_that_came_before_are_not_told_again() -> None:
    bench = Bench(n=1)
    bench.apply(deltas=[delta_of(0, 0, "Hi", HI)])
    bench.apply(deltas=[delta_of(0, 0, "Hi", HI, PART)])
    assert bench.call.streams[0].take_logprobs() == [HI, PART]


def test_an_echoed_prompt_comes_once_and_in_order() -> None:
    bench = Bench(n=1)
    begun = PromptDelta(A0, 1, "Say", 0, (scored(b"S", None, 0),))
    rest = PromptDelta(A0, 1, "", 1, (scored(b"ay", -1.0, 1),))
    bench.apply(prompts=[begun])
    bench.apply(prompts=[begun, rest], deltas=[delta_of(0, 0, "Hi", HI)])
    stream = bench.call.streams[0]
    assert stream.take_text() == "SayHi"
    assert [logprob.token for logprob in stream.take_logprobs()] == [b"S", b"ay", b"Hi"]
    (effect,) = bench.apply(prompts=[PromptDelta(A0, 1, "", 5, (HI,))])
    assert isinstance(effect, DropPeer)
    assert "prompt token 2 is missing; 5 came" in effect.detail


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_whole_answer_has_them_too(is_chat: bool) -> None:
    bench = Bench()
    bench.apply(deltas=[delta_of(0, 0, "Hi", HI), delta(A1, 0, 0, "x")], ended=[ended(A0, 1), ended(A1, 1)])
    logprobs = [stream.take_logprobs() for stream in bench.call.streams]
    answer = json.loads(whole_answer(bench.call, ["Hi", "x"], logprobs, "m", is_chat=is_chat).model_dump_json())
    expected = chat_logprobs([HI]) if is_chat else completion_logprobs([HI])
    assert [choice["logprobs"] for choice in answer["choices"]] == [expected, None]
    (ChatCompletion if is_chat else Completion).model_validate(answer)


def test_what_a_slow_client_leaves_unread_is_bounded_with_scores_counted() -> None:
    many = [scored(b"x", -1.0, 0, *[(b"y", -2.0)] * 20)] * 2
    bench = Bench(n=1, max_unsent_bytes=3000)
    assert not any(isinstance(effect, CutClient) for effect in bench.apply(deltas=[delta_of(0, 0, "x", many[0])]))
    assert any(isinstance(effect, CutClient) for effect in bench.apply(deltas=[delta_of(1, 1, "x", many[1])]))
