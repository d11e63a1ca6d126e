"""Clients that leave or do not read, tokenizers that are lost, and a process that is asked to stop."""

import asyncio
import json
import signal
import socket
from typing import Any

import pytest

from common.messages import Submit
from tests.services.gateway.conftest import Shared
from tests.services.gateway.world import BOUND_S, MODEL, World, parsed_events, started, world

CHOICES = 2


class RawClient:
    """A call on a bare socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def asks(cls, here: World, *, receive_buffer_bytes: int | None = None, **fields: Any) -> "RawClient":
        reader, writer = await here.connect(receive_buffer_bytes=receive_buffer_bytes)
        body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 1000, **fields}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\n\r\n".encode() + body)
        return cls(reader, writer)

    async def read_until(self, part: bytes) -> bytes:
        async with asyncio.timeout(BOUND_S):
            return await self.reader.readuntil(part)

    def leave(self, how: str) -> None:
        if how == "reset":
            self.writer.transport.abort()
        else:
            self.writer.close()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["submitted", "queued", "first token held back", "running"])
def test_a_client_that_leaves_cancels_all_it_asked_for_at_once(
    shared: Shared, phase: str, stream: bool, how: str
) -> None:
    async def test(here: World) -> None:
        client = await RawClient.asks(here, stream=stream, n=CHOICES)
        submit = await here.tokenizer.submitted()
        if phase != "submitted":
            here.tokenizer.queue(submit)
        if phase == "first token held back":
            here.tokenizer.say(submit.choices[0], 0, 0, "")
        if phase == "running":
            here.tokenizer.say(submit.choices[0], 0, 0, "Hello")
        if stream and phase != "submitted":
            await client.read_until(b"\r\n\r\n")
            if phase == "running":
                await client.read_until(b"Hello")
        client.leave(how)
        cancelled = (await here.tokenizer.cancelled()).request_ids
        assert cancelled == tuple(choice.request_id for choice in submit.choices)
        for choice in submit.choices:
            line = await here.gateway.logged("request_finished", request_id=choice.request_id)
            assert (line["reason"], line["status"]) == ("client_gone", 499)
        await here.works()

    shared.run(test)


def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody(shared: Shared) -> None:
    async def test(here: World) -> None:
        _, writer = await here.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b'Content-Length: 100\r\n\r\n{"model":')
        await writer.drain()
        writer.close()
        await here.works()

    shared.run(test)


def test_only_choices_that_still_run_are_cancelled(shared: Shared) -> None:
    async def test(here: World) -> None:
        client = await RawClient.asks(here, stream=True, n=CHOICES)
        submit = await here.tokenizer.submitted()
        here.tokenizer.queue(submit)
        here.tokenizer.end(submit.choices[0], 0)
        await client.read_until(b'"finish_reason":"stop"')
        client.leave("close")
        assert (await here.tokenizer.cancelled()).request_ids == (submit.choices[1].request_id,)

    shared.run(test)


def test_a_stream_that_waits_is_kept_alive_by_comments() -> None:
    async def test() -> None:
        async with world(heartbeat_s=0.1) as here:
            client = await RawClient.asks(here, stream=True)
            submit = await here.tokenizer.submitted()
            here.tokenizer.queue(submit)
            await client.read_until(b": keep-alive\n\n")
            await client.read_until(b": keep-alive\n\n")
            here.tokenizer.say(submit.choices[0], 0, 0, "Hello")
            await client.read_until(b"Hello")
            here.tokenizer.end(submit.choices[0], 1)
            await client.read_until(b"data: [DONE]\n\n")

    asyncio.run(test())


def send_much(here: World, submit: Submit, first_index: int, num_deltas: int, text: str) -> None:
    for index in range(first_index, first_index + num_deltas):
        here.tokenizer.say(submit.choices[0], index, index * len(text), text)


def test_a_client_that_does_not_read_is_cut_off_while_others_stream_on() -> None:
    async def test() -> None:
        async with world(max_unsent_bytes=100_000, send_timeout_s=600) as here:
            slow = await RawClient.asks(here, receive_buffer_bytes=4096, stream=True)
            slow_submit = await here.tokenizer.submitted()
            here.tokenizer.queue(slow_submit)
            await slow.read_until(b"\r\n\r\n")
            other = await RawClient.asks(here, stream=True)
            other_submit = await here.tokenizer.submitted()
            here.tokenizer.queue(other_submit)
            for step in range(60):
                send_much(here, slow_submit, 10 * step, 10, "x" * 1000)
                here.tokenizer.say(other_submit.choices[0], step, 10 * step, f"token {step:03} ")
                await other.read_until(f"token {step:03}".encode())
            assert (await here.tokenizer.cancelled()).request_ids == (slow_submit.choices[0].request_id,)
            line = await here.gateway.logged("request_finished", request_id=slow_submit.choices[0].request_id)
            assert line["reason"] == "slow_client"
            here.tokenizer.end(other_submit.choices[0], 60)
            await other.read_until(b"data: [DONE]\n\n")

    asyncio.run(test())


def test_a_full_connection_that_is_never_read_is_cut_off_in_time() -> None:
    async def test() -> None:
        async with world(max_unsent_bytes=10_000_000, send_timeout_s=0.3) as here:
            slow = await RawClient.asks(here, receive_buffer_bytes=4096, stream=True)
            submit = await here.tokenizer.submitted()
            here.tokenizer.queue(submit)
            await slow.read_until(b"\r\n\r\n")
            send_much(here, submit, 0, 500, "x" * 1000)
            assert (await here.tokenizer.cancelled()).request_ids == (submit.choices[0].request_id,)
            line = await here.gateway.logged("request_finished")
            assert line["reason"] == "slow_client"
            await here.works()

    asyncio.run(test())


def test_a_client_that_reads_slowly_gets_all_its_text_in_fewer_events() -> None:
    async def test() -> None:
        async with world(max_unsent_bytes=50_000_000, send_timeout_s=600) as here:
            client = await RawClient.asks(here, receive_buffer_bytes=4096, stream=True)
            submit = await here.tokenizer.submitted()
            here.tokenizer.queue(submit)
            await client.read_until(b"\r\n\r\n")
            other = await RawClient.asks(here, stream=True)
            other_submit = await here.tokenizer.submitted()
            here.tokenizer.queue(other_submit)
            text = "0123456789" * 100  # short enough for the ring's own task to write it
            for step in range(40):  # 10 MB: more than the kernel's buffers take
                send_much(here, submit, 250 * step, 250, text)
                here.tokenizer.say(other_submit.choices[0], step, 10 * step, f"token {step:03} ")
                await other.read_until(f"token {step:03}".encode())
            here.tokenizer.end(submit.choices[0], 10_000)
            received = bytearray()
            async with asyncio.timeout(BOUND_S):
                while not received.endswith(b"0\r\n\r\n"):
                    received += await client.reader.read(1 << 20)
            events = parsed_events(b"".join(chunks_of(bytes(received))).decode())
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text * 10_000
            assert len(events) < 9_000, "tokens that found the connection full travelled together"
            client.leave("close")

    asyncio.run(test())


def chunks_of(body: bytes) -> list[bytes]:
    """The chunks of a body in chunked encoding."""
    chunks = []
    start = 0
    while start < len(body):
        end_of_size = body.index(b"\r\n", start)
        size = int(body[start:end_of_size], 16)
        chunks.append(body[end_of_size + 2 : end_of_size + 2 + size])
        start = end_of_size + 2 + size + 2
    return chunks


def test_a_lost_tokenizer_is_a_503_where_nothing_was_sent_and_an_error_event_where_something_was() -> None:
    async def test() -> None:
        async with world() as here:
            waiting = asyncio.create_task(here.complete(stream=True))
            await here.tokenizer.submitted()
            whole = asyncio.create_task(here.complete())
            whole_submit = await here.tokenizer.submitted()
            here.tokenizer.queue(whole_submit)
            here.tokenizer.say(whole_submit.choices[0], 0, 0, "Hello")
            asking = asyncio.create_task(here.post("/tokenize", {"prompt": "Hi"}))
            await here.tokenizer.asked()
            running = await RawClient.asks(here, stream=True)
            submit = await here.tokenizer.submitted()
            here.tokenizer.queue(submit)
            here.tokenizer.say(submit.choices[0], 0, 0, "Hello")
            await running.read_until(b"Hello")

            await here.restart_tokenizer()
            for each in (waiting, whole, asking):
                status, answer = await each
                assert (status, answer["error"]["code"]) == (503, "unavailable")
            assert b"was lost" in await running.read_until(b"[DONE]\n\n")
            await here.ready()
            await here.works()

    asyncio.run(test())


def test_a_gap_in_the_tokens_ends_the_link_and_a_new_one_works() -> None:
    async def test() -> None:
        async with world() as here:
            running = await RawClient.asks(here, stream=True)
            submit = await here.tokenizer.submitted()
            here.tokenizer.queue(submit)
            here.tokenizer.say(submit.choices[0], 0, 0, "Hello")
            await running.read_until(b"Hello")
            here.tokenizer.say(submit.choices[0], 2, 11, "gap")
            rest = await running.read_until(b"[DONE]\n\n")
            assert b'{"error":' in rest
            assert b"gap" not in rest
            assert "token 1 is missing; 2 came" in await here.tokenizer.lost()
            await here.ready()
            await here.works()

    asyncio.run(test())


def test_asked_to_stop_the_process_lets_streams_finish_and_takes_nothing_new() -> None:
    async def test() -> None:
        async with world(drain_s=BOUND_S) as here:
            process, tokenizer = here.gateway, here.tokenizer
            running = await RawClient.asks(here, stream=True)
            submit = await tokenizer.submitted()
            tokenizer.queue(submit)
            await running.read_until(b"\r\n\r\n")
            process.process.send_signal(signal.SIGTERM)
            await process.logged("stop_requested")
            status, answer = await here.complete()
            assert (status, answer["error"]["code"]) == (503, "stopping")
            tokenizer.say(submit.choices[0], 0, 0, "Hello")
            tokenizer.end(submit.choices[0], 1)
            rest = await running.read_until(b"[DONE]\n\n")
            assert b'"finish_reason":"stop"' in rest
            assert await process.ended() == 0
            assert await tokenizer.lost() == "the gateway stopped"

    asyncio.run(test())


def test_streams_that_do_not_finish_in_time_end_with_an_error_and_are_cancelled() -> None:
    async def test() -> None:
        async with world(drain_s=0.2) as here:
            process, tokenizer = here.gateway, here.tokenizer
            running = await RawClient.asks(here, stream=True)
            submit = await tokenizer.submitted()
            tokenizer.queue(submit)
            await running.read_until(b"\r\n\r\n")
            process.process.send_signal(signal.SIGTERM)
            rest = await running.read_until(b"[DONE]\n\n")
            assert b'"code":"stopping"' in rest
            assert (await tokenizer.cancelled()).request_ids == (submit.choices[0].request_id,)
            assert await process.ended() == 0

    asyncio.run(test())


def test_a_port_that_is_taken_ends_the_process_with_one_line() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            process = await started(["tcp://127.0.0.1:1"], port=port)
            assert await process.ended() == 2
            assert f"{port}" in process.raw_log
            assert "Traceback" not in process.raw_log

    asyncio.run(test())
