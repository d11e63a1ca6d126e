"""Jobs in threads: each comes back once, done or dropped."""

import asyncio

from common.actor.mailbox import Mailbox
from common.ids import pack_ids
from common.messages import Encode
from common.messages.requests import TextPrompt
from services.tokenizer.jobs import EncodedIds, Job, JobId
from services.tokenizer.text.model_tokenizer import ModelTokenizer
from services.tokenizer.threads import JobEnded, Threads


def encode_job(job_id: int, text: str) -> Job:
    call = Encode(call_id="1", model="smollm2", prompt=TextPrompt(text=text))
    return Job(job_id=JobId(job_id), message=call, vocab_size=49152, max_model_len=64, eos_token_ids=(2,))


def test_a_job_comes_back_with_its_result_and_one_dropped_in_time_without(smollm2: ModelTokenizer) -> None:
    async def test() -> None:
        mailbox = Mailbox()
        threads = Threads(1, smollm2, mailbox)
        threads.start(encode_job(0, "A long text keeps the only thread busy. " * 10_000))
        threads.start(encode_job(1, "dropped"))
        threads.start(encode_job(2, "Hello"))
        threads.drop(JobId(1))
        threads.drop(JobId(99))  # Unknown: it has come back already.
        ended: dict[int, JobEnded] = {}
        async with asyncio.timeout(60):
            while len(ended) < 3:
                event = await anext(mailbox)
                assert isinstance(event, JobEnded)
                ended[event.job_id] = event
                threads.forget(event.job_id)
        threads.close()
        assert [ended[number].future.cancelled() for number in range(3)] == [False, True, False]
        ids = smollm2.encoder.encode_text("Hello")
        assert ended[2].future.result()[0] == EncodedIds(pack_ids(ids), len(ids))

    asyncio.run(test())
