"""The gateway's small parts: events, keys, trace contexts, addresses, options."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from common.messages.requests import FinishReason, RejectReason, RequestRejected
from services.gateway.config import GatewayConfig, read_api_keys
from services.gateway.errors import ApiError, rejection
from services.gateway.http.auth import KeyRing
from services.gateway.http.generation import wrapped_seed
from services.gateway.resolver import resolve
from services.gateway.sse import EventWriter, json_of
from services.gateway.trace_context import trace_context_of
from tests.services.gateway.test_core import A0, A1, Bench, ended, rejected
from tests.services.gateway.world import delta, parsed_events


def written(bench: Bench, **fields: Any) -> list[Any]:
    fields = {"is_chat": False, "includes_usage": False, **fields}
    return parsed_events(events(bench, **fields).render(bench.call.take_fresh()).decode())


def events(bench: Bench, **fields: Any) -> EventWriter:
    return EventWriter(bench.call, model='a "model"', created=9, **fields)


def test_usage_in_every_event_is_that_of_its_choice_so_far() -> None:
    bench = Bench()
    writer = events(bench, is_chat=False, includes_usage=True, has_continuous_usage=True)
    told = []
    for rows in (
        {"deltas": [delta(A0, 0, 0, "x")]},
        {"deltas": [delta(A0, 1, 1, "x"), delta(A1, 0, 0, "y")]},
        {"ended": [ended(A0, 2), ended(A1, 1)]},
    ):
        bench.apply(**rows)
        told += parsed_events(writer.render(bench.call.take_fresh()).decode())
    *chunks, last, done = told
    seen = [(chunk["choices"][0]["index"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert seen == [(0, 1), (0, 2), (1, 1), (0, 2), (1, 1)]
    assert (last["choices"], last["usage"]["completion_tokens"], done) == ([], 3, "[DONE]")


def test_text_that_came_while_the_client_was_full_is_one_event_a_choice() -> None:
    bench = Bench()
    for index in range(3):
        bench.apply(deltas=[delta(A0, index, index, "x"), delta(A1, index, index, "y")])
    assert [(each["choices"][0]["index"], each["choices"][0]["text"]) for each in written(bench)] == [
        (0, "xxx"),
        (1, "yyy"),
    ]
    assert written(bench) == [], "nothing is written twice"


def test_a_token_without_text_is_no_event() -> None:
    bench = Bench(n=1)
    bench.apply(deltas=[delta(A0, 0, 0, "")])
    assert written(bench) == []


def test_a_chat_choice_says_its_role_first_even_without_text() -> None:
    bench = Bench()
    writer = events(bench, is_chat=True, includes_usage=False)
    bench.apply(deltas=[delta(A0, 0, 0, "a")])
    first = parsed_events(writer.render(bench.call.take_fresh()).decode())
    bench.apply(deltas=[delta(A0, 1, 1, "b")], ended=[ended(A1, 0, reason=FinishReason.LENGTH)])
    second = parsed_events(writer.render(bench.call.take_fresh()).decode())
    role = {"role": "assistant", "content": "", "refusal": None}
    assert [(each["choices"][0]["index"], each["choices"][0]["delta"]) for each in first + second] == [
        (0, role),
        (0, {"content": "a"}),
        (0, {"content": "b"}),
        (1, role),
        (1, {}),
    ]
    assert second[-1]["choices"][0]["finish_reason"] == "length"


def test_usage_is_null_in_all_events_but_the_last() -> None:
    bench = Bench(n=1)
    bench.apply(deltas=[delta(A0, 0, 0, "a")], ended=[ended(A0, 1)])
    *chunks, last, done = written(bench, includes_usage=True)
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert (last["choices"], last["usage"]["total_tokens"], done) == ([], 8, "[DONE]")
    assert {(each["id"], each["model"], each["created"]) for each in [*chunks, last]} == {("a", 'a "model"', 9)}


def test_a_failure_is_one_event_after_the_text_that_came_before_it() -> None:
    bench = Bench()
    bench.apply(deltas=[delta(A0, 0, 0, "a")], ended=[rejected(A1)])
    text, error, done = written(bench)
    assert (text["choices"][0]["text"], error["error"]["code"], done) == ("a", "queue_full", "[DONE]")


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x85", "\r\n", "\x0b\x0c\x1c\x1d\x1e", 'é"\\\u0000😀'])
def test_no_reader_takes_a_json_text_for_several_lines(text: str) -> None:
    encoded = json_of(text)
    assert len(encoded.decode().splitlines()) == 1
    assert json.loads(encoded) == text


def test_keys_open_the_door_and_nothing_else_does() -> None:
    KeyRing(()).check("")
    keys = KeyRing(("sesame", "schlüssel"))
    for good in ("Bearer sesame", "bearer sesame ", "Bearer schlüssel"):
        keys.check(good)
    for bad in ("", "Bearer", "Bearer ", "sesame", "Basic sesame", "Bearer sesame2", "Bearer Sesame", "Bearer \udcff"):
        with pytest.raises(ApiError) as caught:
            keys.check(bad)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        assert "sesame" not in caught.value.message


def test_a_file_of_keys_that_holds_none_is_an_error_and_not_an_open_door(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n one \ntwo\n")
    config = GatewayConfig(tokenizers=("tcp://127.0.0.1:1",), api_keys=("zero",), api_keys_file=file)
    assert read_api_keys(config) == ("zero", "one", "two")
    file.write_text("# nothing\n")
    with pytest.raises(OSError, match="holds no key"):
        read_api_keys(config)


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_valid_trace_context_is_passed_on() -> None:
    context = trace_context_of({"traceparent": PARENT, "tracestate": "vendor=1,other=2"})
    assert (context.traceparent, context.tracestate) == (PARENT, "vendor=1,other=2")
    assert trace_context_of({"traceparent": PARENT, "tracestate": "x=" + "y" * 600}).tracestate == ""


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        PARENT.upper(),
        f"ff{PARENT[2:]}",
        PARENT[:-3],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"{PARENT}-x",
    ],
)
def test_an_invalid_one_starts_a_fresh_unsampled_trace(traceparent: str) -> None:
    context = trace_context_of({"traceparent": traceparent, "tracestate": "vendor=1"})
    version, trace_id, span_id, flags = context.traceparent.split("-")
    assert (version, len(trace_id), len(span_id), flags) == ("00", 32, 16, "00")
    assert context.trace_id not in PARENT
    assert context.tracestate == ""


def test_reasons_of_the_ring_become_statuses() -> None:
    def status(reason: RejectReason, retry_after_s: float | None = None) -> tuple[int, str | None]:
        rejected = RequestRejected(request_id=A0, attempt=1, reason=reason, detail="d", retry_after_s=retry_after_s)
        error = rejection(rejected, default_retry_after_s=1)
        return error.status, error.headers.get("Retry-After")

    assert [status(reason) for reason in RejectReason] == [
        (400, None),
        (404, None),
        (400, None),
        (429, "1"),
        (503, "1"),
        (503, "1"),
    ]
    assert status(RejectReason.QUEUE_FULL, 2.1) == (429, "3"), "rounded up: never too early"


def test_seeds_wrap_within_int64() -> None:
    assert [wrapped_seed(seed) for seed in (5, -1, 2**63 - 1, 2**63, 2**63 + 1)] == [
        5,
        -1,
        2**63 - 1,
        -(2**63),
        -(2**63) + 1,
    ]


def test_only_names_are_looked_up() -> None:
    for address in ("tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc:///tmp/x"):
        assert asyncio.run(resolve([address])) == {address: frozenset({address})}
    assert asyncio.run(resolve([f"tcp://{'x' * 64}:1"])) == {}, "an unknown name says nothing of its old addresses"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tokenizers": ()}, "--tokenizers"),
        ({"tokenizers": ("tcp://127.0.0.1",)}, "tcp://127.0.0.1"),
        ({"tokenizers": ("127.0.0.1:5600",)}, "127.0.0.1:5600"),
        ({"tokenizers": ("tcp://h:port",)}, "tcp://h:port"),
        ({"max_body_bytes": 1 << 30}, "--max-body-bytes is 1073741824"),
        ({"heartbeat_s": 0}, "--heartbeat-s is 0"),
        ({"max_choices": 9, "max_open_requests": 8}, "--max-choices 9"),
        ({"link_window": 1}, "--link-window is 1"),
    ],
)
def test_options_that_cannot_work_are_refused_at_the_start(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GatewayConfig(**{"tokenizers": ("tcp://127.0.0.1:1",), **fields})
