"""What clients see of good requests: over HTTP, against the real process."""

import asyncio
import json

import aiohttp
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from common.ids import pack_ids, unpack_ids
from common.messages import CallFailed, Decode, Decoded, Encode, Encoded, Submit
from common.messages.requests import ChatPrompt, FinishReason, IdsPrompt, RejectReason, TextPrompt
from tests.services.gateway.conftest import Shared
from tests.services.gateway.test_parts import PARENT
from tests.services.gateway.world import BOUND_S, MODEL, Tokenizer, World, gateway, world

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def client_of(here: World) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0, timeout=BOUND_S)


def test_a_completion_is_what_openai_answers(shared: Shared) -> None:
    async def test(here: World) -> None:
        here.tokenizer.answer = here.tokenizer.say_hello_world
        status, answer = await here.complete(n=2)
        Completion.model_validate(answer, strict=True)
        assert (status, answer["object"], answer["model"]) == (200, "text_completion", MODEL)
        assert answer["id"].startswith("cmpl-")
        assert [(each["index"], each["text"], each["finish_reason"]) for each in answer["choices"]] == [
            (0, "Hello world", "stop"),
            (1, "Hello world", "stop"),
        ]
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 4,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

        status, answer = await here.post("/v1/chat/completions", CHAT)
        ChatCompletion.model_validate(answer, strict=True)
        assert (status, answer["object"]) == (200, "chat.completion")
        assert answer["id"].startswith("chatcmpl-")
        message = answer["choices"][0]["message"]
        assert (message["role"], message["content"]) == ("assistant", "Hello world")

    shared.run(test)


def test_every_event_of_a_stream_is_a_chunk_as_openai_sends_them(shared: Shared) -> None:
    async def test(here: World) -> None:
        here.tokenizer.answer = here.tokenizer.say_hello_world
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for path, body, kind in (
            ("/v1/completions", {"model": MODEL, "prompt": "Hi"}, Completion),
            ("/v1/chat/completions", CHAT, ChatCompletionChunk),
        ):
            async with here.http.post(here.url + path, json={**body, **options}) as response:
                assert response.status == 200
                assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
                assert response.headers["Cache-Control"] == "no-cache"
                assert response.headers["X-Accel-Buffering"] == "no"
                *chunks, done = await here.events(response)
            for chunk in chunks:
                if kind is Completion:  # OpenAI sends null until the end; its type says otherwise.
                    for choice in chunk["choices"]:
                        choice["finish_reason"] = choice["finish_reason"] or "stop"
                kind.model_validate(chunk, strict=True)
            assert (done, chunks[-1]["usage"]["completion_tokens"]) == ("[DONE]", 2)
            assert len({(each["id"], each["object"], each["created"]) for each in chunks}) == 1

    shared.run(test)


def test_the_openai_client_completes_chats_and_streams(shared: Shared) -> None:
    async def test(here: World) -> None:
        here.tokenizer.answer = here.tokenizer.say_hello_world
        async with client_of(here) as client:
            completion = await client.completions.create(model=MODEL, prompt="Hi", n=2, seed=1, stop=["x"])
            assert [choice.text for choice in completion.choices] == ["Hello world"] * 2

            pieces = await client.completions.create(model=MODEL, prompt="Hi", stream=True)
            assert "".join([piece.choices[0].text async for piece in pieces]) == "Hello world"

            chat = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
            assert chat.choices[0].message.content == "Hello world"
            assert chat.usage is not None
            assert chat.usage.prompt_tokens_details is not None

            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "Hi"}],
                    stream=True,
                    stream_options={"include_usage": True},
                )
            ]
            assert chunks[0].choices[0].delta.role == "assistant"
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert (text, chunks[-1].usage is not None) == ("Hello world", True)
            assert [model.id async for model in client.models.list()] == [MODEL]
            assert (await client.models.retrieve(MODEL)).id == MODEL

    shared.run(test)


def test_the_openai_client_raises_what_each_error_is(shared: Shared) -> None:
    async def test(here: World) -> None:
        async with client_of(here) as client:
            with pytest.raises(openai.BadRequestError, match="temperature") as bad:
                await client.completions.create(model=MODEL, prompt="Hi", temperature=9)
            assert bad.value.param == "temperature"
            with pytest.raises(openai.NotFoundError, match="'other' does not exist") as missing:
                await client.completions.create(model="other", prompt="Hi")
            assert missing.value.code == "model_not_found"

            def too_many(submit: Submit) -> None:
                here.tokenizer.reject(
                    submit.choices[0], RejectReason.QUEUE_FULL, "1024 requests wait; 1024 may", retry_after_s=2.5
                )

            here.tokenizer.answer = too_many
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError, match="1024 may") as full:
                    await client.completions.create(model=MODEL, prompt="Hi", stream=stream)
                assert full.value.response.headers["Retry-After"] == "3"

            def breaks(submit: Submit) -> None:
                here.tokenizer.queue(submit)
                here.tokenizer.say(submit.choices[0], 0, 0, "Hel")
                here.tokenizer.end(submit.choices[0], 1, FinishReason.ERROR, detail="the device broke")

            here.tokenizer.answer = breaks
            with pytest.raises(openai.InternalServerError, match="the device broke"):
                await client.completions.create(model=MODEL, prompt="Hi")
            with pytest.raises(openai.APIError, match="the device broke"):
                async for _ in await client.completions.create(model=MODEL, prompt="Hi", stream=True):
                    pass

    shared.run(test)
    shared.run(World.works)


def test_a_request_goes_down_as_it_was_sent(shared: Shared) -> None:
    async def test(here: World) -> None:
        body = {
            "prompt": [[1, 2], [3]],
            "n": 2,
            "seed": 2**63 - 1,
            "max_tokens": 7,
            "temperature": 0.5,
            "stop": ["a", "b"],
            "slo": {"class": "interactive", "ttft_ms": 300},
            "priority": -3,
            "deadline_ms": 5000,
            "cache_salt": "s",
        }
        headers = {"traceparent": PARENT, "tracestate": "v=1", "x-request-id": "mine-1"}
        asked = asyncio.create_task(here.post("/v1/completions", {"model": MODEL, **body}, headers=headers))
        submits = [await here.tokenizer.submitted() for _ in range(2)]
        ids = [choice.request_id for submit in submits for choice in submit.choices]
        call_id = ids[0].rsplit("-", 1)[0]
        assert ids == [f"{call_id}-{index}" for index in range(4)]
        for submit, prompt in zip(submits, ([1, 2], [3]), strict=True):
            assert submit.prompt == IdsPrompt(token_ids=pack_ids(prompt))
            assert [choice.seed for choice in submit.choices] == [2**63 - 1, -(2**63)]
            assert (submit.attempt, submit.max_tokens, submit.stop) == (1, 7, ("a", "b"))
            assert (submit.tbt_target_ms, submit.ttft_target_ms) == (50, 300)
            assert (submit.priority, submit.deadline_ms, submit.cache_salt) == (-3, 5000, "s")
            assert (submit.traceparent, submit.tracestate) == (PARENT, "v=1")
            here.tokenizer.say_hello_world(submit)
        status, answer = await asked
        assert (status, answer["id"], answer["usage"]["prompt_tokens"]) == (200, call_id, 10)
        line = await here.gateway.logged("request_finished", request_id=ids[3])
        assert (line["http_request_id"], line["trace_id"]) == ("mine-1", PARENT.split("-")[1])

    shared.run(test)


def test_a_chat_without_a_bound_goes_to_the_end_of_the_context_and_draws_a_seed(shared: Shared) -> None:
    async def test(here: World) -> None:
        seeds = set()
        for _ in range(2):
            asked = asyncio.create_task(here.post("/v1/chat/completions", CHAT))
            submit = await here.tokenizer.submitted()
            assert submit.prompt == ChatPrompt(messages=({"role": "user", "content": "Hi"},))
            assert submit.max_tokens is None
            seeds.add(submit.choices[0].seed)
            here.tokenizer.say_hello_world(submit)
            await asked
        assert len(seeds) == 2

    shared.run(test)


def test_the_status_waits_for_the_queue_and_the_text_for_nothing(shared: Shared) -> None:
    async def test(here: World) -> None:
        body = {"model": MODEL, "prompt": "Hi", "stream": True}
        opening = asyncio.create_task(here.http.post(f"{here.url}/v1/completions", json=body).__aenter__())
        submit = await here.tokenizer.submitted()
        assert not opening.done()
        here.tokenizer.queue(submit)
        response = await opening
        assert response.status == 200
        for index, text in enumerate(("a", "é", "😀")):
            here.tokenizer.say(submit.choices[0], index, index, text)
            event = json.loads((await response.content.readuntil(b"\n\n"))[6:])
            assert event["choices"][0]["text"] == text
        here.tokenizer.end(submit.choices[0], 3, FinishReason.LENGTH)
        assert (await here.events(response))[0]["choices"][0]["finish_reason"] == "length"

    shared.run(test)


def test_duplicates_and_old_attempts_do_not_reach_the_client(shared: Shared) -> None:
    async def test(here: World) -> None:
        asked = asyncio.create_task(here.complete())
        submit = await here.tokenizer.submitted()
        (choice,) = submit.choices
        here.tokenizer.queue(submit)
        for _ in range(2):
            here.tokenizer.say(choice, 0, 0, "ab", num_tokens=2)
        here.tokenizer.say(choice, 1, 1, "bc", num_tokens=2)
        here.tokenizer.end(choice, 3)
        here.tokenizer.say(choice, 3, 3, "late")
        here.tokenizer.end(choice, 4)
        assert (await asked)[1]["choices"][0]["text"] == "abc"

    shared.run(test)


def test_one_refused_choice_refuses_the_call_and_cancels_the_others(shared: Shared) -> None:
    async def test(here: World) -> None:
        for stream in (False, True):
            asked = asyncio.create_task(here.complete(prompt=["a", "b"], stream=stream))
            first, second = await here.tokenizer.submitted(), await here.tokenizer.submitted()
            here.tokenizer.queue(first)
            here.tokenizer.reject(second.choices[0], RejectReason.INVALID, "too long: 9 > 8", param="prompt")
            status, answer = await asked
            assert (status, answer["error"]["param"], answer["error"]["message"]) == (400, "prompt", "too long: 9 > 8")
            assert (await here.tokenizer.cancelled()).request_ids == (first.choices[0].request_id,)

    shared.run(test)


def test_text_and_tokens_are_translated_both_ways(shared: Shared) -> None:
    async def test(here: World) -> None:
        asked = asyncio.create_task(here.post("/tokenize", {"prompt": "Hi", "add_special_tokens": False}))
        question = await here.tokenizer.asked()
        assert isinstance(question, Encode)
        assert (question.model, question.prompt, question.add_special_tokens) == (MODEL, TextPrompt(text="Hi"), False)
        here.tokenizer.send(Encoded(call_id=question.call_id, token_ids=pack_ids([5, 6]), max_model_len=2048))
        assert await asked == (200, {"count": 2, "max_model_len": 2048, "tokens": [5, 6]})

        asked = asyncio.create_task(here.post("/detokenize", {"model": MODEL, "tokens": [5, 6]}))
        question = await here.tokenizer.asked()
        assert isinstance(question, Decode)
        assert list(unpack_ids(question.token_ids)) == [5, 6]
        here.tokenizer.send(Decoded(call_id=question.call_id, text="Hi"))
        assert await asked == (200, {"prompt": "Hi"})

        asked = asyncio.create_task(here.post("/tokenize", {"messages": CHAT["messages"]}))
        question = await here.tokenizer.asked()
        failed = CallFailed(
            call_id=question.call_id, reason=RejectReason.INVALID, detail="no template", param="messages"
        )
        here.tokenizer.send(failed)
        status, answer = await asked
        assert (status, answer["error"]["message"], answer["error"]["param"]) == (400, "no template", "messages")

    shared.run(test)


def test_a_long_prompt_is_checked_beside_the_loop_and_arrives_whole(shared: Shared) -> None:
    async def test(here: World) -> None:
        ids = [number % 1000 for number in range(100_000)]
        asked = asyncio.create_task(here.complete(prompt=ids))
        submit = await here.tokenizer.submitted()
        assert submit.prompt == IdsPrompt(token_ids=pack_ids(ids))
        here.tokenizer.say_hello_world(submit)
        assert (await asked)[0] == 200
        status, answer = await here.complete(prompt=[*ids, -1])
        assert (status, answer["error"]["message"]) == (
            400,
            "prompt: token id 100000 is -1; ids are from 0 to 2147483647",
        )

    shared.run(test)


def test_health_and_metrics_tell_the_truth_on_the_public_port(shared: Shared) -> None:
    async def test(here: World) -> None:
        async with here.http.get(f"{here.url}/health/live") as response:
            assert response.status == 200
        async with here.http.get(f"{here.url}/metrics") as response:
            text = await response.text()
        assert 'legato_gateway_calls_total{route="/v1/completions",status="2xx"}' in text
        assert "legato_gateway_open_requests 0.0" in text
        assert MODEL not in text

    shared.run(test)


def test_no_text_of_a_client_or_model_is_in_the_log(shared: Shared) -> None:
    async def test(here: World) -> None:
        here.tokenizer.answer = here.tokenizer.say_hello_world
        await here.complete(prompt="my secret prompt")
        await here.complete(prompt="my secret prompt", secret_field="secret value")
        await here.post("/v1/completions", b'{"prompt": "my secret prompt')
        await here.gateway.logged("call_refused", code="unknown_parameter")
        await here.gateway.logged("call_refused", code="invalid_json")
        for word in ("secret", "Hello", "world", "Say hello"):
            assert word not in here.gateway.raw_log

    shared.run(test)


def test_without_workers_or_tokenizers_the_gateway_is_not_ready_and_says_so() -> None:
    async def test() -> None:
        async with world(num_workers=0) as here:
            status, answer = await here.complete()
            assert (status, answer["error"]["code"]) == (503, "unavailable")
            async with here.http.get(f"{here.url}/health/ready") as response:
                assert (response.status, (await response.json())["reason"]) == (503, "no worker serves a model")
            here.tokenizer.close()
            await here.gateway.logged("tokenizer_lost")
            async with here.http.post(f"{here.url}/v1/completions", json={"model": MODEL, "prompt": "Hi"}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
            async with here.http.get(f"{here.url}/health/ready") as response:
                assert (await response.json())["reason"] == "no tokenizer is connected"

    asyncio.run(test())


def test_a_request_goes_to_the_tokenizer_with_the_fewest_open_requests() -> None:
    async def test() -> None:
        tokenizers = [Tokenizer(), Tokenizer()]
        kept: asyncio.Queue[tuple[Tokenizer, Submit]] = asyncio.Queue()
        for each in tokenizers:
            each.answer = lambda submit, each=each: kept.put_nowait((each, submit))
        try:
            addresses = [each.address for each in tokenizers]
            async with gateway(addresses) as process, aiohttp.ClientSession() as http:
                here = World(process, tokenizers, http)
                for address in addresses:
                    await process.logged("pool_changed", address=address)
                asked = []
                turns = []
                async with asyncio.timeout(BOUND_S):
                    for _ in range(4):
                        asked.append(asyncio.create_task(here.complete()))
                        turns.append(await kept.get())
                assert {id(each) for each, _ in turns[:2]} == {id(each) for each, _ in turns[2:]}
                assert len({id(each) for each, _ in turns[:2]}) == 2
                for tokenizer, submit in turns:
                    tokenizer.say_hello_world(submit)
                assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 4
        finally:
            for each in tokenizers:
                each.close()

    asyncio.run(test())
