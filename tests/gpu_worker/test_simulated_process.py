"""The simulated worker as a process: a scheduler finds what it finds at a real one, but for the time."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from common.ids import Slot
from common.messages.plans import Plan, PlanChunk, PlanRefused
from common.wire.link import PeerGone
from tests.gpu_worker.test_worker_process import (
    NUM_FLOOD_PLANS,
    STOP_TIMEOUT_S,
    end,
    fetch,
    new,
    run,
    scheduler_at,
    status,
)
from tests.ports import free_address

VOCAB_SIZE = 60
EOS = 7
MAX_QUEUED_PLANS = 8
PROMPT = [1] * 40


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address that a worker dials: one process for several tests, so each is a reconnect as well."""
    model = tmp_path_factory.mktemp("metadata")
    address = free_address()
    process = start(address, model)
    yield address
    process.send_signal(signal.SIGTERM)
    assert process.wait(STOP_TIMEOUT_S) == 0, end(process)
    end(process)


def start(address: str, model: Path, *more: str) -> "subprocess.Popen[str]":
    """Start a worker with a model that has a vocabulary and no weights."""
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024, "eos_token_id": EOS}
    (model / "config.json").write_text(json.dumps(config))
    argv = [sys.executable, "-m", "gpu_worker", "--scheduler", address, "--model", str(model)]
    argv += ["--device", "simulated", "--profile", "h200-smollm2", "--served-model-name", "tiny", *more]
    argv += ["--max-queued-plans", str(MAX_QUEUED_PLANS), "--kv-tokens", "4000"]
    return subprocess.Popen(argv, env=os.environ, stderr=subprocess.PIPE, text=True)


def opening(epoch: int = 1) -> Plan:
    chunk = PlanChunk(Slot(3), 0, len(PROMPT), is_sampled=True)
    return Plan(epoch=epoch, iteration=0, introduced=(new(3, PROMPT),), chunks=(chunk,))


def test_plans_sent_one_ahead_are_answered_in_order_and_back_to_back(address: str) -> None:
    async def test() -> None:
        async with scheduler_at(address) as scheduler:
            _, card = await scheduler.connected()
            assert (card.device, card.model.name, card.num_blocks) == ("simulated h200-smollm2", "tiny", 250)
            plans = [
                opening(),
                Plan(epoch=1, iteration=1, decode_added=(Slot(3),)),
                *(Plan(epoch=1, iteration=iteration) for iteration in range(2, MAX_QUEUED_PLANS)),
            ]
            for plan in plans:
                scheduler.peer.send(plan)
            finished_ns = 0
            for plan in plans:
                done = await scheduler.done()
                assert (done.iteration, done.slots) == (plan.iteration, (Slot(3),))
                assert EOS not in done.token_ids
                assert max(done.token_ids) < VOCAB_SIZE
                assert done.started_ns == max(finished_ns, done.received_ns)
                assert done.finished_ns == done.started_ns + done.device_ns
                finished_ns = done.finished_ns

    run(test)


def test_a_scheduler_that_comes_back_finds_the_same_worker_with_no_state(address: str) -> None:
    async def test() -> None:
        async with scheduler_at(address) as scheduler:
            first_id, _ = await scheduler.connected()
            scheduler.peer.send(opening())
            expected = (await scheduler.done()).token_ids
            scheduler.peer.send(Plan(epoch=1, iteration=1, decode_added=(Slot(3),)))  # Its result comes to nobody.
        async with scheduler_at(address) as scheduler:
            assert (await scheduler.connected())[0] == first_id
            scheduler.peer.send(opening())
            assert (await scheduler.done()).token_ids == expected
            scheduler.peer.send(Plan(epoch=1, iteration=5))
            assert isinstance(await scheduler.result(), PlanRefused)

    run(test)


def test_a_scheduler_that_floods_the_worker_is_cut_off_and_may_come_back(address: str) -> None:
    async def test() -> None:
        async with scheduler_at(address) as scheduler:
            await scheduler.connected()
            scheduler.peer.send(opening())
            with suppress(PeerGone):  # A worker may be quicker than the flood.
                for iteration in range(1, NUM_FLOOD_PLANS):
                    scheduler.peer.send(Plan(epoch=1, iteration=iteration))
            assert await scheduler.lost() == f"more than {MAX_QUEUED_PLANS} plans wait for the device"
            await scheduler.connected()
            scheduler.peer.send(opening())
            assert len((await scheduler.done()).token_ids) == 1

    run(test)


def test_readiness_and_metrics_follow_the_scheduler_and_a_signal_ends_the_process(tmp_path: Path) -> None:
    async def test() -> None:
        process = start(address := free_address(), tmp_path)
        try:
            assert process.stderr is not None
            started = json.loads(await asyncio.to_thread(process.stderr.readline))
            assert await asyncio.to_thread(status, started["admin"], "/health/ready") == 503
            async with scheduler_at(address) as scheduler:
                await scheduler.connected()
                scheduler.peer.send(opening())
                await scheduler.done()
                assert await asyncio.to_thread(status, started["admin"], "/health/ready") == 200
                metrics = await asyncio.to_thread(fetch, started["admin"], "/metrics")
                assert "legato_worker_iterations_total 1.0" in metrics
                assert "legato_worker_simulated_lateness_seconds_count 1.0" in metrics
                process.send_signal(signal.SIGTERM)
                assert await scheduler.lost() == "the process stopped"
            assert await asyncio.to_thread(process.wait, STOP_TIMEOUT_S) == 0
        finally:
            end(process)

    run(test)
