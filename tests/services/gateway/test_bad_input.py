"""What bad input gets: a clear error that names what is wrong; and the next request works."""

import asyncio
import json
import re
from typing import Any

import pytest

from tests.services.gateway.conftest import Shared
from tests.services.gateway.world import BOUND_S, MODEL, World, world

GOOD = {"model": MODEL, "prompt": "Hi"}
BODIES: list[tuple[bytes | dict[str, Any], int, str | None, str]] = [
    # body, status, param, part of the message
    (b"", 400, None, "empty"),
    (b"{", 400, None, "not valid JSON"),
    (b"[1]", 400, None, "an array"),
    (b'{"model": "tiny", "prompt": "\xff"}', 400, None, "UTF-8"),
    (b'{"model": "tiny", "prompt": "\\ud800"}', 400, None, "surrogate"),
    (b'{"model": "tiny", "prompt": "Hi", "stop": "a\\udfff"}', 400, None, "surrogate"),
    (b'{"model": "tiny", "prompt": "Hi", "user": "\xed\xa0\x80"}', 400, None, "UTF-8"),
    (b'{"model": "tiny", "prompt": "Hi", "temperature": NaN}', 400, None, "not valid JSON"),
    (b'{"model": "tiny", "prompt": "Hi", "temperature": 1e999}', 400, None, "out of range"),
    (b'{"model": "tiny", "prompt": "Hi", "seed": ' + b"9" * 5000 + b"}", 400, None, "out of range"),
    (b'{"model": "tiny", "prompt": "Hi", "user": ' + b"[" * 200 + b"]" * 200 + b"}", 400, None, "64 levels"),
    (b"[" * 10_000, 400, None, "64 levels"),
    (b"[" * 900_000, 400, None, "20000 objects and arrays"),
    ({**GOOD, "prompt": ""}, 400, "prompt", "empty"),
    ({**GOOD, "prompt": []}, 400, "prompt", "empty"),
    ({**GOOD, "prompt": [5, 1000]}, 400, "prompt", "vocabulary has 1000"),
    ({**GOOD, "prompt": [True]}, 400, "prompt", "true"),
    ({**GOOD, "stop_token_ids": [1000]}, 400, "stop_token_ids", "vocabulary has 1000"),
    ({**GOOD, "temperature": True}, 400, "temperature", "true"),
    ({**GOOD, "seed": 2**63}, 400, "seed", "9223372036854775808"),
    ({**GOOD, "max_tokens": 10**30}, 400, "max_tokens", "1000000000000000000000000000000"),
    ({**GOOD, "n": 5}, 400, "n", "at most 4"),
    ({**GOOD, "suffix": "x"}, 400, "suffix", "not supported"),
    ({**GOOD, "logprobs": 6}, 400, "logprobs", "less than or equal to 5"),
    ({**GOOD, "presence_penalty": 2.1}, 400, "presence_penalty", "less than or equal to 2"),
    ({**GOOD, "logit_bias": {"1000": 1}}, 400, "logit_bias", "vocabulary has 1000"),
    ({**GOOD, "logit_bias": {"hello": 1}}, 400, "logit_bias", "you should only be submitting non-negative integers"),
    ({**GOOD, "temprature": 1}, 400, "temprature", "unknown field"),
    ({"prompt": "Hi"}, 400, "model", "required"),
    ({**GOOD, "model": "other"}, 404, "model", "'other' does not exist"),
]


@pytest.mark.parametrize(("body", "status", "param", "part"), BODIES, ids=lambda value: repr(value)[:40])
def test_bad_bodies_get_a_clear_error(
    shared: Shared, body: bytes | dict[str, Any], status: int, param: str | None, part: str
) -> None:
    async def test(here: World) -> None:
        got, answer = await here.post("/v1/completions", body)
        error = answer["error"]
        assert (got, error["param"]) == (status, param), answer
        assert part in error["message"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert here.tokenizer.submits.empty()
        await here.works()

    shared.run(test)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "Hi"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content"),
    ],
)
def test_bad_messages_get_a_clear_error(shared: Shared, messages: list[Any], param: str) -> None:
    async def test(here: World) -> None:
        status, answer = await here.post("/v1/chat/completions", {"model": MODEL, "messages": messages})
        assert (status, answer["error"]["param"]) == (400, param)

    shared.run(test)


def test_other_types_and_encodings_are_a_415(shared: Shared) -> None:
    async def test(here: World) -> None:
        body = json.dumps(GOOD).encode()
        for headers in (
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/x-www-form-urlencoded"},
            {"Content-Type": "application/json; charset=utf-16"},
            {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        ):
            status, answer = await here.post("/v1/completions", body, headers=headers)
            assert (status, answer["error"]["type"]) == (415, "invalid_request_error"), headers
        status, _ = await here.post("/v1/completions", body, headers={}, skip_auto_headers=["Content-Type"])
        assert status == 415
        await here.works()

    shared.run(test)


def test_unknown_routes_and_methods_have_openais_shape(shared: Shared) -> None:
    async def test(here: World) -> None:
        async with here.http.get(f"{here.url}/v1/nothing") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
        async with here.http.get(f"{here.url}/v1/completions") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert (await response.json())["error"]["code"] == "method_not_allowed"
        async with here.http.get(f"{here.url}/v1/models/other") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
            assert response.headers["x-request-id"].startswith("req-")

    shared.run(test)


HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def answer_to(here: World, head: str, body: bytes) -> tuple[int, bytes, int]:
    """Send raw bytes, as far as the server takes them; return status, answer and how much of the body was sent."""
    reader, writer = await here.connect()
    writer.write(head.encode("latin-1"))
    # Read while the body is sent: who closes a connection on which more still comes may cut off its own answer.
    answer = asyncio.create_task(answer_on(reader))
    num_sent = 0
    try:
        for start in range(0, len(body), 1 << 16):
            writer.write(body[start : start + (1 << 16)])
            await writer.drain()
            num_sent = min(len(body), start + (1 << 16))
    except ConnectionError:
        pass
    status, rest = await answer
    writer.close()
    return status, rest, num_sent


async def answer_on(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and whole answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    assert length is not None, head
    return int(head.split()[1]), head + await reader.readexactly(int(length.group(1)))


def test_an_http_1_0_client_that_would_keep_the_connection_sees_a_streams_end(shared: Shared) -> None:
    async def test(here: World) -> None:
        here.tokenizer.answer = here.tokenizer.say_hello_world
        body = b'{"model": "tiny", "prompt": "x", "max_tokens": 3, "stream": true}'
        reader, writer = await here.connect()
        head = f"{HEAD.replace('HTTP/1.1', 'HTTP/1.0')}Connection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(30):  # Well below the time for which a connection is kept.
            answer = await reader.read()
        writer.close()
        assert b"Hello" in answer
        assert answer.endswith(b"data: [DONE]\n\n")

    shared.run(test)


def test_50_megabytes_are_a_413_whether_announced_or_not(shared: Shared) -> None:
    async def test(here: World) -> None:
        big = b'{"model": "tiny", "prompt": "' + b"x" * 50_000_000 + b'"}'
        status, answer, _ = await answer_to(here, f"{HEAD}Content-Length: {len(big)}\r\n\r\n", big)
        assert status == 413
        assert b"this server takes at most 1000000" in answer
        await here.works()

        chunk = b"%x\r\n" % (1 << 20) + b"x" * (1 << 20) + b"\r\n"
        status, answer, _ = await answer_to(here, f"{HEAD}Transfer-Encoding: chunked\r\n\r\n", chunk * 50)
        assert status == 413
        await here.works()

    shared.run(test)


def test_a_client_that_asks_first_is_told_before_it_sends(shared: Shared) -> None:
    async def test(here: World) -> None:
        expect = "Expect: 100-continue\r\n"
        status, _, _ = await answer_to(here, f"{HEAD}{expect}Content-Length: 50000000\r\n\r\n", b"")
        assert status == 413

        reader, writer = await here.connect()
        body = json.dumps(GOOD).encode()
        writer.write(f"{HEAD}{expect}Content-Length: {len(body)}\r\n\r\n".encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        here.tokenizer.say_hello_world(await here.tokenizer.submitted())
        assert b"200 OK" in await reader.readline()

    shared.run(test)


@pytest.mark.parametrize(
    ("head", "body", "statuses"),
    [
        ("NOT HTTP AT ALL\r\n\r\n", b"", {400}),
        ("GET /\x00 HTTP/1.1\r\n\r\n", b"", {400}),
        (f"GET /{'x' * 20_000} HTTP/1.1\r\n\r\n", b"", {400, 414}),
        (f"{HEAD}Content-Length: -5\r\n\r\n", b"", {400}),
        (f"{HEAD}Content-Length: 5\r\nContent-Length: 6\r\n\r\n", b"{}", {400}),
        (f"{HEAD}x-note: my\x01secret\r\n\r\n", b"", {400}),
    ],
)
def test_what_is_no_http_is_a_400_and_is_not_quoted_in_the_log(
    shared: Shared, head: str, body: bytes, statuses: set[int]
) -> None:
    async def test(here: World) -> None:
        status, _, _ = await answer_to(here, head, body)
        assert status in statuses
        for word in ("NOT HTTP", "secret"):
            assert word not in here.gateway.raw_log
        await here.works()

    shared.run(test)


def test_keys_guard_every_route_but_health() -> None:
    async def test() -> None:
        async with world(api_keys="sesame,other") as here:
            key = {"Authorization": "Bearer sesame"}
            for path in ("/v1/models", "/metrics", "/v1/nothing"):
                async with here.http.get(here.url + path) as response:
                    assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
                async with here.http.get(here.url + path, headers=key) as response:
                    assert response.status != 401
            status, _ = await here.complete()
            assert status == 401
            here.tokenizer.answer = here.tokenizer.say_hello_world
            status, _ = await here.complete()
            assert status == 401
            status, _ = await here.post("/v1/completions", GOOD, headers=key)
            assert status == 200
            assert "sesame" not in here.gateway.raw_log

    asyncio.run(test())


def test_every_wait_has_a_bound_and_says_which_it_is() -> None:
    async def test() -> None:
        async with world(
            # The last one bounds every call here that needs a connection.
            queue_timeout_s=0.3,
            call_timeout_s=0.3,
            body_timeout_s=0.3,
            first_request_timeout_s=3,
        ) as here:
            asked = asyncio.create_task(here.complete(n=2))
            submit = await here.tokenizer.submitted()
            status, answer = await asked
            assert (status, answer["error"]["code"]) == (503, "queue_timeout")
            ids = tuple(choice.request_id for choice in submit.choices)
            assert (await here.tokenizer.cancelled()).request_ids == ids

            status, answer = await here.post("/tokenize", {"prompt": "Hi"})
            assert (status, answer["error"]["message"]) == (503, "no answer within 0.3 s")

            status, late, _ = await answer_to(here, f"{HEAD}Content-Length: 50\r\n\r\n", b"{")
            assert (status, b"body_timeout" in late) == (408, True)

            # Depending on how it arrives, the parser finds the fault, or the rest of the body is waited for.
            status, _, _ = await answer_to(here, f"{HEAD}Transfer-Encoding: chunked\r\n\r\n", b"zz\r\nnot a chunk")
            assert status in (400, 408)
            assert "not a chunk" not in here.gateway.raw_log

            reader, _ = await here.connect()
            assert await reader.read() == b"", "a connection that never says a word is closed"

    asyncio.run(test())


def test_a_ring_that_falls_silent_is_given_up() -> None:
    async def test() -> None:
        async with world(silence_timeout_s=0.3) as here:
            asked = asyncio.create_task(here.complete())
            submit = await here.tokenizer.submitted()
            here.tokenizer.queue(submit)
            status, answer = await asked
            assert (status, answer["error"]["code"]) == (503, "timeout")
            assert (await here.tokenizer.cancelled()).request_ids == (submit.choices[0].request_id,)

    asyncio.run(test())


def test_more_requests_or_connections_than_allowed_are_turned_away_with_the_numbers() -> None:
    async def test() -> None:
        async with world(max_open_requests=2, max_choices=2, max_connections=4) as here:
            first = asyncio.create_task(here.complete(n=2))
            submit = await here.tokenizer.submitted()
            status, answer = await here.complete()
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            assert "2 requests are open and 1 more came; this server takes 2" in answer["error"]["message"]
            here.tokenizer.say_hello_world(submit)
            assert (await first)[0] == 200

            idle = [await here.connect() for _ in range(4)]  # Beside those that the calls above still hold open.
            refused, *_ = await asyncio.wait(
                [asyncio.create_task(reader.read()) for reader, _ in idle], return_when=asyncio.FIRST_COMPLETED
            )
            for each in refused:
                assert each.result().startswith(b"HTTP/1.1 503 ")
                assert b"4 connections are open" in each.result()
            for _, writer in idle:
                writer.close()
            await here.works()
            async with here.http.get(f"{here.url}/metrics") as response:
                counted = re.search(r'_rejections_total\{code="too_many_connections"\} (\S+)', await response.text())
            assert counted is not None
            assert float(counted.group(1)) >= len(refused)

    asyncio.run(test())


def test_a_full_link_is_a_503_and_leaves_room_for_cancel() -> None:
    async def test() -> None:
        async with world(window=8) as here:
            here.tokenizer.hold()
            asked = [asyncio.create_task(here.complete()) for _ in range(8)]  # one more than fits
            done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=BOUND_S)
            assert [(status, answer["error"]["code"]) for status, answer in map(asyncio.Task.result, done)] == [
                (503, "link_full")
            ]
            for each in waiting:
                each.cancel()
            await here.gateway.logged_times(7, "request_finished", reason="client_gone")
            here.tokenizer.go_on()
            submitted = {(await here.tokenizer.submitted()).choices[0].request_id for _ in range(7)}
            cancelled: set[str] = set()
            while cancelled != submitted:
                cancelled |= set((await here.tokenizer.cancelled()).request_ids)
            await here.works()

    asyncio.run(test())
