"""A worker of several real processes, and a scheduler played by the test: what they compute, and how they end."""

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from common.actor.mailbox import Mailbox
from common.clock import monotonic_ns
from common.ids import InstanceId, RequestId, Slot, TokenizerId, WorkerId, pack_ids
from common.messages import Plan
from common.messages.links import Role
from common.messages.plans import PlanChunk
from common.messages.ranks import RankReady
from common.messages.requests import Sampling
from common.messages.streams import RequestArrived
from common.process import Process, ProcessConfig
from common.wire.session import Endpoint
from gpu_worker.errors import UnusableModel
from gpu_worker.parallel.errors import RankLost
from gpu_worker.parallel.layout import Layout
from gpu_worker.parallel.progress import Progress
from gpu_worker.parallel.ranks import Ranks
from services.scheduler.core import SchedulerCore
from services.scheduler.encoder import PlanEncoder
from services.scheduler.events import Event, RunIteration, SendStreams, WorkerJoined, WorkerReported
from services.scheduler.limits import Limits
from tests.gpu_worker.hf import hf_greedy, tiny_llama
from tests.gpu_worker.test_worker_process import (
    Scheduler,
    end,
    fetch,
    new,
    scheduler_at,
    start,
)
from tests.gpu_worker.world import prompt
from tests.ports import free_address

END_TIMEOUT_S = 60
TEST_TIMEOUT_S = 200
"""Of a test as a whole: on a busy machine two processes take half a minute to import torch."""
HOST_RANKS = ("-m", "tests.gpu_worker.host_ranks")
HEARTBEAT = ["--heartbeat-timeout-ms", "5000"]
"""Long enough that a process which merely has to wait for a core does not seem silent."""


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await test()

    asyncio.run(bounded())


class Worker:
    """A worker whose ranks are processes of this machine, and its log so far."""

    def __init__(self, address: str, model: Path, *flags: str, program: tuple[str, ...]) -> None:
        self.process = start(address, model, *flags, program=program)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError):
            self.lines.extend(iter(self.process.stderr.readline, ""))

    def logged(self, event: str) -> list[dict[str, Any]]:
        found = []
        for line in list(self.lines):
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                if entry.get("event") == event:
                    found.append(entry)
        return found

    def pid(self, rank: int) -> int:
        if rank == 0:
            return self.process.pid
        return next(int(line["pid"]) for line in self.logged("rank_started") if line["rank"] == rank)

    def admin(self) -> str:
        return next(str(line["admin"]) for line in self.logged("process_started") if line["role"] == "worker")

    async def status(self) -> int:
        return await asyncio.to_thread(self.process.wait, END_TIMEOUT_S)

    async def are_all_gone(self) -> bool:
        """Whether every process of this worker ends soon."""
        deadline = time.monotonic() + END_TIMEOUT_S
        pids = [int(line["pid"]) for line in self.logged("rank_started")]
        while any(_is_alive(pid) for pid in pids):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True


@contextlib.contextmanager
def ranks(address: str, model: Path, *flags: str, program: tuple[str, ...] = ("-m", "gpu_worker")) -> Iterator[Worker]:
    worker = Worker(address, model, *flags, program=program)
    try:
        yield worker
    finally:
        pids = [int(line["pid"]) for line in worker.logged("rank_started")]
        if worker.process.poll() is None:
            worker.process.kill()
        worker.process.wait(END_TIMEOUT_S)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if worker.process.stderr is not None:
            worker.process.stderr.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module", autouse=True)
def reference(model: Path) -> LlamaForCausalLM:
    """The model at that path, in float32."""
    return tiny_llama(model, num_attention_heads=2, num_key_value_heads=1)


def progress(num_stages: int) -> Progress:
    return Progress(num_stages, on_through=lambda planned, last: None)


def opening() -> Plan:
    return Plan(epoch=1, iteration=0, introduced=(new(0, prompt(6)),), chunks=(PlanChunk(Slot(0), 0, 6, True),))


async def is_serving(scheduler: Scheduler) -> None:
    """Wait for a worker that has run one plan, and has another in hand."""
    await scheduler.connected()
    scheduler.peer.send(opening())
    await scheduler.done()


async def is_right(worker: Worker, scheduler: Scheduler, reference: LlamaForCausalLM, num_stages: int) -> None:
    """Check a worker's card, its tokens, and what it says of bubbles."""
    _, card = await scheduler.connected()
    assert (card.tensor_parallel, card.pipeline_parallel) == ((1, 2) if num_stages == 2 else (2, 1))
    assert (card.shape.num_layers, card.shape.num_heads) == (3, 2), "of the whole model"
    output = await generate(scheduler)
    assert output[3] == hf_greedy(reference, prompt(5), 8)
    assert output[0] == hf_greedy(reference, prompt(40), 7)
    metrics = await asyncio.to_thread(fetch, worker.admin(), "/metrics")
    bubbles = re.findall(r'legato_worker_stage_bubble_seconds_total\{stage="(\d)"\} (\S+)', metrics)
    assert [stage for stage, _ in bubbles] == [str(stage) for stage in range(num_stages)]
    # With the same request in every plan, a stage always waits for the other.
    assert all((float(seconds) > 0) == (num_stages > 1) for _, seconds in bubbles)


def test_stages_give_the_tokens_of_transformers_and_a_signal_ends_all_ranks(
    model: Path, reference: LlamaForCausalLM
) -> None:
    async def test() -> None:
        address = free_address()
        with ranks(address, model, "--pp", "2") as worker:
            async with scheduler_at(address) as scheduler:
                await is_right(worker, scheduler, reference, num_stages=2)
                output = await take_turns(scheduler)
                assert output[1] == hf_greedy(reference, prompt(9), 6)
                assert output[2] == hf_greedy(reference, prompt(12), 6)
            async with scheduler_at(address) as scheduler:
                served = await serve_micro_batches(scheduler)
                assert served == {length: hf_greedy(reference, prompt(length), 10) for length in served}
                worker.process.send_signal(signal.SIGTERM)
                assert await scheduler.lost() == "the process stopped"
            assert await worker.status() == 0
            assert await worker.are_all_gone()
            assert not worker.logged("rank_killed")

    run(test)


def test_shares_give_the_tokens_of_transformers_and_a_killed_rank_ends_the_worker(
    model: Path, reference: LlamaForCausalLM
) -> None:
    async def test() -> None:
        address = free_address()
        with ranks(address, model, "--tp", "2") as worker:
            async with scheduler_at(address) as scheduler:
                await is_right(worker, scheduler, reference, num_stages=1)
                os.kill(worker.pid(1), signal.SIGKILL)
                await scheduler.lost()
            assert await worker.status() == 1
            assert await worker.are_all_gone()
            assert [line["rank"] for line in worker.logged("rank_lost")] == [1]

    run(test)


def test_a_rank_that_falls_silent_ends_the_worker_while_plans_wait_for_it(model: Path) -> None:
    async def test() -> None:
        address = free_address()
        with ranks(address, model, "--pp", "2", *HEARTBEAT) as worker:
            async with scheduler_at(address) as scheduler:
                await is_serving(scheduler)
                os.kill(worker.pid(1), signal.SIGSTOP)
                for iteration in range(1, 4):
                    added = (Slot(0),) if iteration == 1 else ()
                    scheduler.peer.send(Plan(epoch=1, iteration=iteration, decode_added=added))
                await scheduler.lost()
            assert await worker.status() == 1
            assert await worker.are_all_gone()
            assert [line["rank"] for line in worker.logged("rank_lost")] == [1]

    run(test)


async def generate(scheduler: Scheduler) -> dict[int, list[int]]:
    """A decode beside a prompt in two chunks, then two decodes; each plan leaves before the last result is here."""
    plans = [
        Plan(
            epoch=1,
            iteration=0,
            introduced=(new(3, prompt(5)), new(0, prompt(40), first_block=4)),
            chunks=(PlanChunk(Slot(3), 0, 5, True), PlanChunk(Slot(0), 0, 17, False)),
        ),
        Plan(epoch=1, iteration=1, decode_added=(Slot(3),), chunks=(PlanChunk(Slot(0), 17, 23, True),)),
        Plan(epoch=1, iteration=2, decode_added=(Slot(0),)),
        *(Plan(epoch=1, iteration=iteration) for iteration in range(3, 8)),
    ]
    output: dict[int, list[int]] = {3: [], 0: []}
    scheduler.peer.send(plans[0])
    for iteration, plan in enumerate(plans):
        for ahead in plans[iteration + 1 : iteration + 2]:
            scheduler.peer.send(ahead)
        done = await scheduler.done()
        assert (done.epoch, done.iteration) == (1, plan.iteration)
        for slot, token_id in zip(done.slots, done.token_ids, strict=True):
            output[slot].append(token_id)
    return output


async def take_turns(scheduler: Scheduler) -> dict[int, list[int]]:
    """Two requests in two micro-batches that take turns, three plans in flight: each is in one at a time."""
    lens = {1: 9, 2: 12}
    plans = [
        Plan(
            epoch=2,
            iteration=iteration,
            introduced=(new(slot, prompt(lens[slot]), first_block=4 * slot),) if turn == 0 else (),
            chunks=(PlanChunk(Slot(slot), *((0, lens[slot]) if turn == 0 else (lens[slot] + turn - 1, 1)), True),),
        )
        for iteration, (turn, slot) in enumerate((turn, slot) for turn in range(6) for slot in lens)
    ]
    output: dict[int, list[int]] = {slot: [] for slot in lens}
    for plan in plans[:3]:
        scheduler.peer.send(plan)
    for iteration in range(len(plans)):
        done = await scheduler.done()
        assert (done.epoch, done.iteration) == (2, iteration)
        for slot, token_id in zip(done.slots, done.token_ids, strict=True):
            output[slot].append(token_id)
        for plan in plans[iteration + 3 : iteration + 4]:
            scheduler.peer.send(plan)
    return output


async def serve_micro_batches(scheduler: Scheduler) -> dict[int, list[int]]:
    """The real scheduler core serves four prompts of different lengths; their outputs. While they stream, two plans of
    different requests are in flight, and a third ahead."""
    instance_id, card = await scheduler.connected()
    worker_id = WorkerId(instance_id)
    core, encoder = SchedulerCore(Limits(tbt_target_ns=10**9)), PlanEncoder()
    output: dict[int, list[int]] = {4: [], 7: [], 9: [], 12: []}
    in_flight: deque[RunIteration] = deque()
    num_disjoint = num_repeated = 0

    def step(event: Event) -> None:
        for effect in core.step(event, monotonic_ns()):
            match effect:
                case RunIteration():
                    in_flight.append(effect)
                    scheduler.peer.send(encoder.encode(effect))
                case SendStreams():
                    for sampled in effect.batch.sampled:
                        output[int(sampled.request_id)] += sampled.token_ids

    step(WorkerJoined(worker_id=worker_id, card=card))
    for length in output:
        step(arrival(length))
    while core.num_open:
        done = await scheduler.done()
        assert (done.epoch, done.iteration) == (in_flight[0].epoch, in_flight[0].iteration)
        in_flight.popleft()
        step(WorkerReported(worker_id=worker_id, report=done))
        streams = [{decode.request_id for decode in plan.decodes} for plan in in_flight]
        if len(streams) == 3 and all(streams):
            num_disjoint += streams[0].isdisjoint(streams[1])
            num_repeated += streams[0] == streams[2]
    assert num_disjoint >= 5
    assert num_repeated >= 5
    return output


def arrival(length: int) -> RequestArrived:
    return RequestArrived(
        request_id=RequestId(str(length)),
        tokenizer_id=TokenizerId(InstanceId("tokenizer")),
        attempt=1,
        token_ids=pack_ids(prompt(length)),
        num_prompt_tokens=length,
        max_tokens=10,
        seed=0,
        sampling=Sampling(temperature=0.0, ignore_eos=True),
    )


def test_ranks_that_an_operator_starts_serve_and_end_with_the_rank_that_leads_them(model: Path) -> None:
    async def test() -> None:
        address, meeting = free_address(), free_address()
        common = ("--pp", "2", "--rank-address", meeting)
        other = start(address, model, *common, "--rank", "1")
        try:
            with ranks(address, model, *common, "--rank", "0") as first:
                async with scheduler_at(address) as scheduler:
                    await is_serving(scheduler)
                    first.process.kill()
                    await scheduler.lost()
            assert await asyncio.to_thread(other.wait, END_TIMEOUT_S) == 1
        finally:
            errors = end(other)
        assert '"event": "rank_lost"' in errors

    run(test)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_on_devices_serve_and_a_lost_one_ends_all(
    model: Path, reference: LlamaForCausalLM, tp: int, pp: int
) -> None:
    """The CUDA worker's own ranks, with the host in the device's place (see host_ranks)."""

    async def test() -> None:
        address, meeting = free_address(), free_address()
        flags = (
            "--device",
            "cuda",
            "--tp",
            str(tp),
            "--pp",
            str(pp),
            "--rank-address",
            meeting,
            "--max-model-len",
            "200",
        )
        other = start(address, model, *flags, "--rank", "1", program=HOST_RANKS)
        try:
            with ranks(address, model, *flags, "--rank", "0", program=HOST_RANKS) as worker:
                async with scheduler_at(address) as scheduler:
                    await is_right(worker, scheduler, reference, num_stages=pp)
                    output = await take_turns(scheduler)
                    assert output[1] == hf_greedy(reference, prompt(9), 6)
                    assert output[2] == hf_greedy(reference, prompt(12), 6)
                if pp > 1:
                    async with scheduler_at(address) as scheduler:
                        served = await serve_micro_batches(scheduler)
                        assert served == {length: hf_greedy(reference, prompt(length), 10) for length in served}
                async with scheduler_at(address) as scheduler:
                    await is_serving(scheduler)
                    other.kill()
                    await scheduler.lost()
                assert await worker.status() == 1
                assert [line["rank"] for line in worker.logged("rank_lost")] == [1]
        finally:
            end(other)

    run(test)


def test_ranks_of_different_settings_are_refused_with_both() -> None:
    async def test() -> None:
        process, other = Process(Role.WORKER, ProcessConfig()), Process(Role.RANK, ProcessConfig())
        address = free_address()
        layout = Layout(tp=1, pp=2, rank=0)
        try:
            inbox = Ranks(process, layout, address, progress(2))
            serving = asyncio.create_task(inbox.serve(start_timeout_s=END_TIMEOUT_S))
            mailbox = Mailbox()
            endpoint = Endpoint(hello=other.hello(rank=1), peer_roles=frozenset({Role.WORKER}), mailbox=mailbox)
            other.sockets.dial(address, endpoint)
            (await anext(mailbox)).peer.send(RankReady(settings="tp 1, pp 2, model b"))
            inbox.note_own(RankReady(settings="tp 1, pp 2, model a"))
            with pytest.raises(UnusableModel, match="rank 1 runs tp 1, pp 2, model b; rank 0 runs tp 1, pp 2, model a"):
                await serving
        finally:
            process.sockets.close()
            other.sockets.close()

    run(test)


def test_ranks_go_on_when_all_are_ready_and_who_does_not_come_is_missed() -> None:
    async def test() -> None:
        process, other = Process(Role.WORKER, ProcessConfig()), Process(Role.RANK, ProcessConfig())
        address = free_address()
        try:
            inbox = Ranks(process, Layout(tp=1, pp=2, rank=0), address, progress(2))
            serving = asyncio.create_task(inbox.serve(start_timeout_s=END_TIMEOUT_S))
            mailbox = Mailbox()
            endpoint = Endpoint(hello=other.hello(rank=1), peer_roles=frozenset({Role.WORKER}), mailbox=mailbox)
            other.sockets.dial(address, endpoint)
            (await anext(mailbox)).peer.send(RankReady(settings=""))
            inbox.note_own(RankReady(settings=""))
            await asyncio.wait_for(asyncio.wrap_future(inbox.all_ready), END_TIMEOUT_S)
            serving.cancel()
            alone = Ranks(process, Layout(tp=1, pp=3, rank=0), free_address(), progress(3))
            with pytest.raises(RankLost, match=r"rank 1: not ready after 0\.05 s"):
                await alone.serve(start_timeout_s=0.05)
        finally:
            process.sockets.close()
            other.sockets.close()

    run(test)


def test_a_model_that_does_not_come_apart_ends_the_process_with_a_message(model: Path) -> None:
    process = start("tcp://127.0.0.1:9", model, "--tp", "3")
    try:
        assert process.wait(TEST_TIMEOUT_S) == 2
    finally:
        errors = end(process)
    assert "legato worker: --tp is 3; this model's 2 heads do not come in 3 equal parts\n" in errors


def _is_alive(pid: int) -> bool:
    """Whether there is such a process that has not ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
