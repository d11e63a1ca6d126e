"""A real worker process, and a scheduler played by the test over real sockets."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from common.actor.mailbox import Mailbox
from common.ids import InstanceId, RequestId, Slot, new_instance_id, pack_ids
from common.messages import IterationDone, Plan, PlanRefused
from common.messages.cards import WorkerCard
from common.messages.links import Hello, Role
from common.messages.plans import NewRequest, PlanChunk
from common.messages.requests import Sampling
from common.wire.link import Peer, PeerDown, PeerGone, PeerUp, Received
from common.wire.session import Endpoint
from common.wire.zmq_link import Sockets
from common.wire.zmq_socket import LinkSettings
from gpu_worker.kernels.build import usable_instruction_sets
from tests.gpu_worker.hf import TINY_VOCAB_SIZE, hf_greedy, tiny_llama
from tests.gpu_worker.world import prompt
from tests.ports import free_address

START_TIMEOUT_S = 120
"""Of a test with the process that it starts: on a busy machine that takes half a minute to import torch."""
STOP_TIMEOUT_S = 60
KV_TOKENS = 400
NUM_FLOOD_PLANS = 100
"""Far more than may wait, so that they are too many even if their sender has to stop now and then; fewer than the
sender's socket holds."""
OPTIONS = ["--kv-tokens", str(KV_TOKENS), "--max-num-slots", "8", "--max-chunk-tokens", "64", "--threads", "1"]
OPTIONS += ["--profile-seconds", "0.05", "--dtype", "float32", "--served-model-name", "tiny", "--max-queued-plans", "8"]


@dataclass
class Worker:
    """A worker that has been started, and where it looks for its scheduler."""

    process: "subprocess.Popen[str]"
    address: str
    model: LlamaForCausalLM


def start(
    address: str, model: Path, *more: str, program: tuple[str, ...] = ("-m", "gpu_worker")
) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, *program, "--scheduler", address, "--model", str(model), *OPTIONS, *more]
    return subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)


def end(process: "subprocess.Popen[str]") -> str:
    """Make sure that the process is gone; return what it wrote."""
    if process.poll() is None:
        process.kill()
    _, errors = process.communicate(timeout=STOP_TIMEOUT_S)
    return errors


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One process for several tests: each binds the address anew, so each is a reconnect as well."""
    path = tmp_path_factory.mktemp("llama")
    model = tiny_llama(path, groups=3)
    address = free_address()
    process = start(address, path)
    yield Worker(process, address, model)
    process.send_signal(signal.SIGTERM)
    assert process.wait(STOP_TIMEOUT_S) == 0, end(process)
    end(process)


def scheduler_endpoint(mailbox: Mailbox) -> Endpoint:
    hello = Hello(role=Role.SCHEDULER, instance_id=new_instance_id(Role.SCHEDULER), window=64)
    return Endpoint(hello=hello, peer_roles=frozenset({Role.WORKER}), mailbox=mailbox)


class Scheduler:
    """What the test sees of the worker that dialled it."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.peer: Peer

    async def connected(self) -> tuple[InstanceId, WorkerCard]:
        """Wait for the worker; return its id and card."""
        event = await self._next()
        assert isinstance(event, PeerUp), event
        self.peer = event.peer
        assert event.peer.hello.worker is not None
        return event.peer.hello.instance_id, event.peer.hello.worker

    async def done(self) -> IterationDone:
        result = await self.result()
        assert isinstance(result, IterationDone), result
        return result

    async def result(self) -> Any:
        event = await self._next()
        assert isinstance(event, Received), event
        return event.message

    async def lost(self) -> str:
        event = await self._next()
        while isinstance(event, Received):
            event = await self._next()
        assert isinstance(event, PeerDown), event
        return event.detail

    async def _next(self) -> Any:
        return await anext(self._mailbox)


@asynccontextmanager
async def scheduler_at(address: str) -> AsyncIterator[Scheduler]:
    sockets = Sockets(LinkSettings())
    mailbox = Mailbox()
    sockets.bind(address, scheduler_endpoint(mailbox))
    try:
        yield Scheduler(mailbox)
    finally:
        sockets.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            await test()

    asyncio.run(bounded())


def new(slot: int, token_ids: list[int], *, first_block: int = 0, num_blocks: int = 4, **sampling: Any) -> NewRequest:
    return NewRequest(
        slot=Slot(slot),
        request_id=RequestId(f"r{slot}"),
        token_ids=pack_ids(token_ids),
        num_prompt_tokens=len(token_ids),
        seed=0,
        sampling=Sampling(**{"temperature": 0.0, **sampling}),
        block_table=pack_ids(range(first_block, first_block + num_blocks)),
    )


def test_the_card_says_what_the_worker_holds(worker: Worker) -> None:
    async def test() -> None:
        async with scheduler_at(worker.address) as scheduler:
            _, card = await scheduler.connected()
            assert (card.model.name, card.model.vocab_size) == ("tiny", TINY_VOCAB_SIZE)
            assert (card.model.max_model_len, card.model.eos_token_ids) == (1024, (5, 7))
            assert (card.dtype, card.attention, card.is_batch_invariant) == ("float32", "native", True)
            # What a saved fit of the cost model is of: the processor, and what of it is used.
            assert card.device.startswith("cpu ")
            assert card.device.endswith(f", {usable_instruction_sets()[0]}, 1 threads")
            assert card.num_blocks * card.block_size == KV_TOKENS
            assert (card.max_num_slots, card.max_chunk_tokens) == (8, 64)
            sizes = [point.num_tokens for point in card.profile]
            assert sizes[:2] == [1, 8]
            assert sizes == sorted(set(sizes))
            assert all(point.iteration_ns > 0 for point in card.profile)

    run(test)


def test_plans_sent_one_ahead_give_the_tokens_of_transformers(worker: Worker) -> None:
    async def test() -> None:
        async with scheduler_at(worker.address) as scheduler:
            await scheduler.connected()
            chat, document = prompt(5), prompt(40)
            plans = [
                Plan(
                    epoch=1,
                    iteration=0,
                    introduced=(new(3, chat), new(0, document, first_block=4)),
                    chunks=(PlanChunk(Slot(3), 0, 5, True), PlanChunk(Slot(0), 0, 17, False)),
                ),
                Plan(epoch=1, iteration=1, decode_added=(Slot(3),), chunks=(PlanChunk(Slot(0), 17, 23, True),)),
                Plan(epoch=1, iteration=2, decode_added=(Slot(0),)),
                *(Plan(epoch=1, iteration=iteration) for iteration in range(3, 8)),
            ]
            output: dict[int, list[int]] = {3: [], 0: []}
            scheduler.peer.send(plans[0])
            finished_ns = 0
            for iteration, plan in enumerate(plans):
                if iteration + 1 < len(plans):
                    scheduler.peer.send(plans[iteration + 1])  # Before the result of this one is here.
                done = await scheduler.done()
                assert (done.epoch, done.iteration) == (1, plan.iteration)
                assert done.received_ns <= done.started_ns <= done.finished_ns
                assert finished_ns <= done.started_ns
                assert 0 < done.device_ns <= done.finished_ns - done.started_ns
                finished_ns = done.finished_ns
                for slot, token_id in zip(done.slots, done.token_ids, strict=True):
                    output[slot].append(token_id)
            assert output[3] == hf_greedy(worker.model, chat, 8)
            assert output[0] == hf_greedy(worker.model, document, 7)

    run(test)


def test_a_plan_that_cannot_be_applied_is_refused_once_and_a_new_epoch_goes_on(worker: Worker) -> None:
    async def test() -> None:
        async with scheduler_at(worker.address) as scheduler:
            await scheduler.connected()
            tokens = prompt(6)
            first = PlanChunk(Slot(1), 0, 6, True)
            scheduler.peer.send(Plan(epoch=1, iteration=0, introduced=(new(1, tokens),), chunks=(first,)))
            (sampled,) = (await scheduler.done()).token_ids
            scheduler.peer.send(Plan(epoch=1, iteration=2))
            scheduler.peer.send(Plan(epoch=1, iteration=3))  # Ignored: no answer.
            # The epoch that follows carries full state; what was computed is still in the cache.
            scheduler.peer.send(
                Plan(epoch=2, iteration=0, introduced=(new(1, [*tokens, sampled]),), decode_added=(Slot(1),))
            )
            refused = await scheduler.result()
            assert refused == PlanRefused(epoch=1, iteration=2, detail="iteration 2 came where 1 was due")
            done = await scheduler.done()
            assert (done.epoch, done.iteration, done.slots) == (2, 0, (Slot(1),))
            assert [sampled, *done.token_ids] == hf_greedy(worker.model, tokens, 2)

    run(test)


def test_a_scheduler_that_comes_back_finds_the_same_worker_with_no_state(worker: Worker) -> None:
    async def test() -> None:
        tokens = prompt(6)
        opening = Plan(
            epoch=1, iteration=0, introduced=(new(1, tokens),), chunks=(PlanChunk(Slot(1), 0, 6, is_sampled=True),)
        )
        async with scheduler_at(worker.address) as scheduler:
            first_id, first_card = await scheduler.connected()
            scheduler.peer.send(opening)
            expected = await scheduler.done()
            scheduler.peer.send(Plan(epoch=1, iteration=1, decode_added=(Slot(1),)))  # Its result comes to nobody.
        async with scheduler_at(worker.address) as scheduler:
            assert await scheduler.connected() == (first_id, first_card)
            scheduler.peer.send(opening)
            assert (await scheduler.done()).token_ids == expected.token_ids

    run(test)


def test_a_scheduler_that_floods_the_worker_is_cut_off_and_may_come_back(worker: Worker) -> None:
    async def test() -> None:
        async with scheduler_at(worker.address) as scheduler:
            await scheduler.connected()
            tokens = prompt(60)
            with suppress(PeerGone):  # A worker may be quicker than the flood.
                for iteration in range(NUM_FLOOD_PLANS):
                    slot = Slot(iteration % 8)
                    released = (slot,) if iteration >= 8 else ()
                    chunk = PlanChunk(slot, 0, 60, is_sampled=True)
                    scheduler.peer.send(
                        Plan(
                            epoch=1,
                            iteration=iteration,
                            released=released,
                            introduced=(new(slot, tokens),),
                            chunks=(chunk,),
                        )
                    )
            assert await scheduler.lost() == "more than 8 plans wait for the device"
            await scheduler.connected()
            scheduler.peer.send(Plan(epoch=1, iteration=0))
            assert (await scheduler.done()).slots == ()

    run(test)


def test_readiness_follows_the_scheduler_and_a_signal_ends_the_process(tmp_path: Path) -> None:
    tiny_llama(tmp_path)

    async def test() -> None:
        process = start(address := free_address(), tmp_path)
        try:
            assert process.stderr is not None
            started = json.loads(await asyncio.to_thread(process.stderr.readline))
            assert started["event"] == "process_started"
            assert await asyncio.to_thread(status, started["admin"], "/health/live") == 200
            assert await asyncio.to_thread(status, started["admin"], "/health/ready") == 503
            async with scheduler_at(address) as scheduler:
                await scheduler.connected()
                scheduler.peer.send(Plan(epoch=1, iteration=0))
                await scheduler.done()  # By now it has seen its own side of the connection open.
                assert await asyncio.to_thread(status, started["admin"], "/health/ready") == 200
                metrics = await asyncio.to_thread(fetch, started["admin"], "/metrics")
                assert "legato_worker_iterations_total 1.0" in metrics
                process.send_signal(signal.SIGTERM)
                assert await scheduler.lost() == "the process stopped"
            assert await asyncio.to_thread(process.wait, STOP_TIMEOUT_S) == 0
        finally:
            end(process)

    run(test)


def status(admin: str, path: str) -> int:
    try:
        with urllib.request.urlopen(admin + path, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def fetch(admin: str, path: str) -> str:
    with urllib.request.urlopen(admin + path, timeout=10) as response:
        body: bytes = response.read()
    return body.decode()


def test_a_model_that_cannot_be_served_ends_the_process_with_a_message(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    process = start("tcp://127.0.0.1:9", tmp_path)
    try:
        assert process.wait(START_TIMEOUT_S) == 2
    finally:
        errors = end(process)
    last = errors.splitlines()[-1]
    assert last.startswith("legato worker: architecture 'BertModel' is not supported; known: LlamaForCausalLM, Mistral")


BROKEN = """
import sys
from msgspec.structs import replace
from gpu_worker import shell
from gpu_worker.__main__ import main
from gpu_worker.build import Built
import dataclasses

sound = shell.build

def build_with_a_bug(config):
    # Promises positions that the rotation table does not have.
    built = sound(config)
    return dataclasses.replace(built, limits=dataclasses.replace(built.limits, max_model_len=2000))

shell.build = build_with_a_bug
sys.exit(main())
"""


def test_a_bug_in_the_forward_pass_ends_the_process_loudly(tmp_path: Path) -> None:
    tiny_llama(tmp_path, max_position_embeddings=300)

    async def test() -> None:
        process = start(address := free_address(), tmp_path, program=("-c", BROKEN))
        try:
            async with scheduler_at(address) as scheduler:
                await scheduler.connected()
                request = new(0, prompt(306), num_blocks=20)
                chunk = PlanChunk(Slot(0), 300, 6, is_sampled=True)
                scheduler.peer.send(Plan(epoch=1, iteration=0, introduced=(request,), chunks=(chunk,)))
                await scheduler.lost()
            assert await asyncio.to_thread(process.wait, STOP_TIMEOUT_S) == 1
        finally:
            errors = end(process)
        assert "IndexError" in errors

    run(test)
