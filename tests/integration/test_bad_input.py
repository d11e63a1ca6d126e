"""Bad input to the running system: a clear error, nothing lost, and the next request works."""

import http.client
import json
from typing import Any

import pytest

from tests.integration.system import System

Json = dict[str, Any]
JSON_HEADERS = {"Content-Type": "application/json"}


def post(system: System, path: str, body: bytes, headers: dict[str, str] = JSON_HEADERS) -> tuple[int, Json]:
    connection = http.client.HTTPConnection("127.0.0.1", system.port, timeout=60)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "smollm2", "prompt": "hi", "max_tokens": 2, **fields}).encode()


def chat(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": "smollm2", "messages": messages, "max_tokens": 2, **fields}).encode()


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CASES: list[tuple[str, str, bytes, int, str | None, list[str]]] = [
    # name, path, body, status, param, words that the message must hold
    ("a prompt longer than the context", COMPLETIONS, completion(prompt=[9] * 8192), 400, "prompt", ["8192"]),
    ("max_tokens beyond the context", COMPLETIONS, completion(max_tokens=8192), 400, "max_tokens", ["8192"]),
    ("an empty prompt", COMPLETIONS, completion(prompt=""), 400, "prompt", []),
    ("an empty list of ids", COMPLETIONS, completion(prompt=[]), 400, "prompt", []),
    ("no prompt", COMPLETIONS, b'{"model": "smollm2"}', 400, "prompt", []),
    ("empty messages", CHAT, chat(messages=[]), 400, "messages", []),
    ("an id out of vocabulary", COMPLETIONS, completion(prompt=[1, 49152]), 400, "prompt", ["49152"]),
    ("a negative id", COMPLETIONS, completion(prompt=[-1]), 400, "prompt", ["-1"]),
    ("NaN", COMPLETIONS, completion(temperature=float("nan")), 400, None, []),
    ("infinity", COMPLETIONS, completion(top_p=float("inf")), 400, None, []),
    ("a temperature below 0", COMPLETIONS, completion(temperature=-0.1), 400, "temperature", ["0"]),
    ("top_p above 1", COMPLETIONS, completion(top_p=1.5), 400, "top_p", ["1"]),
    ("min_p below 0", COMPLETIONS, completion(min_p=-1), 400, "min_p", []),
    ("max_tokens 0", COMPLETIONS, completion(max_tokens=0), 400, "max_tokens", []),
    ("min_tokens above max_tokens", COMPLETIONS, completion(min_tokens=3), 400, "min_tokens", ["3", "2"]),
    ("a seed beyond int64", COMPLETIONS, completion(seed=2**63), 400, "seed", []),
    ("a number as text", COMPLETIONS, completion(temperature="hot"), 400, "temperature", []),
    ("a bool as a number", COMPLETIONS, completion(max_tokens=True), 400, "max_tokens", []),
    ("an unknown role", CHAT, chat(messages=[{"role": "wizard", "content": "hi"}]), 400, "messages", ["wizard"]),
    ("a lone surrogate", COMPLETIONS, b'{"model": "smollm2", "prompt": "\\ud800"}', 400, None, []),
    ("invalid UTF-8", COMPLETIONS, b'{"model": "smollm2", "prompt": "\xff\xfe"}', 400, None, []),
    ("broken JSON", COMPLETIONS, b'{"model": ', 400, None, []),
    ("an empty body", COMPLETIONS, b"", 400, None, []),
    ("a list for an object", COMPLETIONS, b"[]", 400, None, []),
    ("200 levels of nesting", COMPLETIONS, completion(metadata=0)[:-2] + b"[" * 200 + b"]" * 200 + b"}", 400, None, []),
    ("a misspelt field", COMPLETIONS, completion(temprature=1), 400, "temprature", []),
    ("an unknown model", COMPLETIONS, completion(model="gpt-4"), 404, "model", ["gpt-4"]),
    ("a bias of no token", COMPLETIONS, completion(logit_bias={"49152": 1}), 400, "logit_bias", ["49152"]),
    ("too many logprobs", COMPLETIONS, completion(logprobs=6), 400, "logprobs", ["6", "5"]),
    ("a number for logprobs in chat", CHAT, chat(logprobs=3), 400, "logprobs", ["3"]),
    ("top_logprobs alone", CHAT, chat(top_logprobs=3), 400, "top_logprobs", ["must be enabled"]),
    ("a presence penalty", COMPLETIONS, completion(presence_penalty=2.5), 400, "presence_penalty", ["2.5"]),
    ("a frequency penalty", CHAT, chat(frequency_penalty=-3), 400, "frequency_penalty", ["-3"]),
    ("a repetition penalty", CHAT, chat(repetition_penalty=0), 400, "repetition_penalty", ["0"]),
    ("tools", CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools", []),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_it_is_refused_with_the_field_and_the_numbers(
    system: System, path: str, body: bytes, status: int, param: str | None, words: list[str]
) -> None:
    got, answer = post(system, path, body)

    assert got == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert str(error["param"]).split(".")[0].split("[")[0] == param
    for word in words:
        assert word in error["message"]
    assert system.complete("1, 2, 3,", max_tokens=2)["choices"][0]["text"]


def test_a_body_of_50_megabytes_is_too_large_and_is_not_read(system: System) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", system.port, timeout=60)
    connection.putrequest("POST", COMPLETIONS)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(50 * 1024 * 1024))
    connection.endheaders(b'{"prompt": "')
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["type"] == "invalid_request_error"
    connection.close()
    assert system.complete("1, 2, 3,", max_tokens=2)["choices"][0]["text"]


def test_a_wrong_content_type_is_named(system: System) -> None:
    status, answer = post(system, COMPLETIONS, completion(), {"Content-Type": "text/plain"})
    assert status == 415
    assert "text/plain" in answer["error"]["message"]


def test_unknown_paths_and_methods_are_refused_in_the_same_shape(system: System) -> None:
    assert post(system, "/v1/nothing", completion())[0] == 404
    response = system.get(COMPLETIONS)
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_after_all_that_no_block_is_lost(system: System) -> None:
    system.wait_idle()
