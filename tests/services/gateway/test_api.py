"""Bodies: what is taken, what is refused, and that a refusal names the field."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from common.ids import unpack_ids
from common.messages.requests import IdsPrompt, Sampling, TextPrompt
from services.gateway.api.chat import ChatBody, parse_chat
from services.gateway.api.completions import CompletionBody, parse_completion
from services.gateway.api.fields import HARMLESS, NEUTRAL_IN_CHAT, NEUTRAL_IN_COMPLETIONS
from services.gateway.api.json_body import MAX_NESTING, decode_object
from services.gateway.api.tokens import parse_detokenize, parse_tokenize
from services.gateway.errors import ApiError

USER = [{"role": "user", "content": "Hi"}]


def completion(**fields: Any) -> CompletionBody:
    return parse_completion({"model": "m", "prompt": "Hi", **fields}, max_choices=4, max_prompts=3)


def chat(**fields: Any) -> ChatBody:
    return parse_chat({"model": "m", "messages": USER, **fields}, max_choices=4)


def refused(parse: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_openais() -> None:
    body = completion()
    assert (body.bounded_tokens, body.num_choices, body.sampling()) == (16, 1, Sampling())
    assert chat().bounded_tokens is None, "absent: to the end of the context"
    assert chat(max_tokens=5).bounded_tokens == chat(max_completion_tokens=5).bounded_tokens == 5


def test_null_means_absent() -> None:
    names = set(CompletionBody.model_fields) - {"model", "prompt"}
    assert completion(**dict.fromkeys(names)) == completion()
    assert chat(**dict.fromkeys(set(ChatBody.model_fields) - {"model", "messages"})) == chat()


def test_sampling_is_passed_on_as_given() -> None:
    sampling = completion(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, min_tokens=2, stop_token_ids=[3], ignore_eos=True
    ).sampling()
    assert sampling == Sampling(
        temperature=0.0, top_p=0.5, top_k=0, min_p=0.1, min_tokens=2, stop_token_ids=(3,), ignore_eos=True
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_come_in_four_shapes(prompt: Any, expected: Any) -> None:
    def plain(each: TextPrompt | IdsPrompt) -> Any:
        return each.text if isinstance(each, TextPrompt) else list(unpack_ids(each.token_ids))

    assert [plain(each) for each in completion(prompt=prompt).prompts(vocab_size=10)] == expected


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("", "it is empty"),
        ([], "it is empty"),
        ([[]], "entry 0 is empty"),
        (["a", ""], "entry 1 is empty"),
        (None, "it was null"),
        (5, "it was 5"),
        ({"a": 1}, "an object"),
        ([1, "a"], "token id 1 must be an integer; it was 'a'"),
        ([1, True], "token id 1 must be an integer; it was true"),
        ([True], "entry 0 must be a string or a list of token ids; it was true"),
        ([1.5, 2], "entry 0"),
        ([-1], "token id 0 is -1"),
        ([2**31], "token id 0 is 2147483648"),
        ([10**5000], "an integer of 16610 bits"),
        (["a", [1]], "mixes"),
        ([[1], [None]], "entry 1: token id 0"),
        (["a", "b", "c", "d"], "4 prompts; this server allows at most 3"),
    ],
)
def test_other_prompts_are_refused_with_the_reason(prompt: Any, problem: str) -> None:
    error = refused(completion, prompt=prompt)
    assert error.param == "prompt"
    assert problem in error.message


def test_of_many_errors_the_first_is_told_and_the_others_are_not_made() -> None:
    wrong = [{"role": "nobody", "content": "x"}] * 3
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"model": "m", "messages": wrong})
    assert len(caught.value.errors()) == 1
    error = refused(chat, **{f"field {index}": 1 for index in range(1000)})
    assert "the body has 1002 fields; no request has more than 256" in error.message


def test_more_choices_than_a_link_takes_are_refused_with_the_bound() -> None:
    body = {"model": "m", "prompt": ["a", "b", "c"], "n": 171}
    with pytest.raises(ApiError, match="3 prompts with n 171 are 513 choices; one call may have 512") as caught:
        parse_completion(body, max_choices=200, max_prompts=3)
    assert (caught.value.status, caught.value.param) == (400, "n")
    assert parse_completion(body | {"n": 170}, max_choices=200, max_prompts=3).num_choices == 170


def test_token_ids_outside_the_vocabulary_are_refused_with_both_numbers() -> None:
    with pytest.raises(ApiError, match="token id 10; this model's vocabulary has 10") as caught:
        completion(prompt=[9, 10]).prompts(vocab_size=10)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 16.0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 10**5000}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x" * 1025]}, "stop[0]"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"slo": {"tbt_ms": 0}}, "slo.tbt_ms"),
        ({"slo": {"class": "fast"}}, "slo.class"),
        ({"slo": {"klass": "batch"}}, "slo.klass"),
        ({"priority": 2**31}, "priority"),
        ({"deadline_ms": -1}, "deadline_ms"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"model": 7}, "model"),
        ({"best_of": 2}, "best_of"),
        ({"temprature": 1}, "temprature"),
        ({"x" * 500: 1}, "x" * 60 + "…"),
    ],
)
def test_what_is_out_of_range_mistyped_or_unknown_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(completion, **fields)
    assert error.param == param
    assert len(error.message) < 300


def test_bounds_themselves_are_allowed() -> None:
    completion(temperature=2, top_p=1, min_p=1, seed=2**63 - 1, n=4, stop=["x"] * 16, min_tokens=16, best_of=4)
    completion(temperature=0, top_k=0, seed=-(2**63), stop="x", slo={"tbt_ms": 1, "ttft_ms": 2.5, "class": "batch"})


NOT_NEUTRAL: dict[str, list[Any]] = {
    "suffix": ["end"],
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required", {"type": "function"}],
    "functions": [[{}]],
    "function_call": [{"name": "f"}],
    "response_format": [{"type": "json_object"}, {"type": "text", "x": 1}],
    "modalities": [["text", "audio"]],
    "audio": [{}],
    "prediction": [{"type": "content"}],
    "reasoning_effort": ["low"],
    "verbosity": ["high"],
    "web_search_options": [{}],
}
NEUTRAL: dict[str, list[Any]] = {
    "suffix": [""],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "functions": [[]],
    "function_call": ["none"],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
}


def test_what_is_not_supported_passes_with_its_neutral_value_and_is_refused_by_name_with_any_other() -> None:
    for parse, fields in ((completion, NEUTRAL_IN_COMPLETIONS), (chat, NEUTRAL_IN_CHAT)):
        for name in fields:
            for value in [None, *NEUTRAL.get(name, [])]:
                parse(**{name: value})
            for value in NOT_NEUTRAL[name]:
                error = refused(parse, **{name: value})
                assert (error.param, error.code) == (name, "unsupported_parameter"), value


def test_harmless_fields_pass_with_any_value() -> None:
    completion(**{name: {"a": ["b"]} for name in HARMLESS})
    chat(user="me", metadata={"k": "v"}, store=True, service_tier="auto")


def test_chat_messages_are_flattened_for_the_template() -> None:
    prompt = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "annotations": []},
            {"role": "tool", "tool_call_id": "t", "content": "42"},
        ]
    ).prompt()
    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42", "tool_call_id": "t"},
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("Hi", "messages"),
        (["Hi"], "messages[0]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "wizard", "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content"),
        ([{"role": "user", "content": "Hi", "nam": "x"}], "messages[0].nam"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)
def test_other_messages_are_refused_by_place(messages: Any, param: str) -> None:
    assert refused(chat, messages=messages).param == param


def test_two_names_of_one_bound_must_agree() -> None:
    chat(max_tokens=5, max_completion_tokens=5)
    assert refused(chat, max_tokens=5, max_completion_tokens=6).param == "max_tokens"


def test_tokenize_takes_either_text_or_messages() -> None:
    assert parse_tokenize({"prompt": "a"}).text_or_chat() == TextPrompt(text="a")
    assert not parse_tokenize({"messages": USER, "add_generation_prompt": False}).text_or_chat().add_generation_prompt  # type: ignore[union-attr]
    for body in ({}, {"prompt": "a", "messages": USER}):
        with pytest.raises(ApiError, match="exactly one"):
            parse_tokenize(body)
    assert parse_detokenize({"tokens": []}).tokens.packed == b""
    with pytest.raises(ApiError, match="token id 0 must be an integer"):
        parse_detokenize({"tokens": ["a"]})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"{} {}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00 \\ud800"}',
        b'{"\\ud800": 1}',
        b"\xef\xbb\xbf{}",
        b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"a": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_plain_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_object(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_nesting_is_allowed_up_to_its_bound_and_breadth_is_no_depth() -> None:
    decode_object(b'{"a": ' + b"[" * (MAX_NESTING - 1) + b"]" * (MAX_NESTING - 1) + b"}")
    decode_object(b'{"a": [' + b"[1], " * 500 + b"[2]]}")
    with pytest.raises(ApiError, match="more than 20000 objects"):
        decode_object(b'{"a": [' + b"{}, " * 20_000 + b"1]}")
    code = 'f(x[0]) = {"a": [1]}\\' * 20_000  # Brackets in a string are no containers.
    assert decode_object(json.dumps({"a": code}).encode()) == {"a": code}


def test_a_string_without_an_end_is_refused_in_one_pass() -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        decode_object(b'{"a": "' + b'\\"[' * 1_000_000)
    with pytest.raises(ApiError, match="deeper than 64"):
        decode_object(b'{"a": ' + b"[" * MAX_NESTING + b"]" * MAX_NESTING + b"}")
