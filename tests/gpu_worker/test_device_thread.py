"""The thread that owns the device: its order, its bound, and its end."""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.ids import RequestId, Slot, pack_ids
from common.messages.plans import IterationDone, NewRequest, Plan, PlanChunk
from common.messages.requests import Sampling
from gpu_worker.build import Built, build
from gpu_worker.config import WorkerConfig
from gpu_worker.device_thread import Connection, DeviceThread
from tests.gpu_worker.hf import tiny_llama

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama(path, max_position_embeddings=64)
    config = WorkerConfig(
        scheduler="tcp://127.0.0.1:9", model=str(path), kv_tokens=256, threads=1, max_num_slots=8, dtype="float32"
    )
    return build(config)


class Harness:
    """A device thread that builds nothing until it is let go, and what it reported."""

    def __init__(self, built: Built, *, max_queued_plans: int = 8) -> None:
        self.reports: queue.Queue[Any] = queue.Queue()
        self.may_build = threading.Event()
        self.waits_for_stop = False
        self.thread = DeviceThread(
            build=lambda should_stop: self._build(built, should_stop),
            on_built=self.reports.put,
            on_failed=self.reports.put,
            max_queued_plans=max_queued_plans,
        )

    def connection(self, built: Built) -> Connection:
        return Connection(built.limits, self.reports.put)

    def next_report(self) -> Any:
        return self.reports.get(timeout=TIMEOUT_S)

    def _build(self, built: Built, should_stop: Callable[[], bool]) -> Built:
        assert self.may_build.wait(TIMEOUT_S)
        while self.waits_for_stop and not should_stop():
            time.sleep(0.001)
        return built


@pytest.fixture
def harness_of() -> Iterator[Callable[[Built], Harness]]:
    started: list[Harness] = []

    def start(built: Built) -> Harness:
        started.append(Harness(built))
        return started[-1]

    yield start
    for harness in started:
        harness.may_build.set()
        harness.thread.stop()


def plan(iteration: int, num_tokens: int = 4) -> Plan:
    """Introduce a request in the slot of that number, and compute its prompt."""
    request = NewRequest(
        slot=Slot(iteration),
        request_id=RequestId("r"),
        token_ids=pack_ids(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        seed=0,
        sampling=Sampling(),
        block_table=pack_ids(range(16)),
    )
    chunk = PlanChunk(Slot(iteration), 0, num_tokens, is_sampled=True)
    return Plan(epoch=1, iteration=iteration, introduced=(request,), chunks=(chunk,))


def test_plans_run_in_order_after_the_build(built: Built, harness_of: Callable[[Built], Harness]) -> None:
    harness = harness_of(built)
    connection = harness.connection(built)
    for iteration in range(5):
        assert harness.thread.submit(connection, plan(iteration), received_ns=iteration)
    harness.may_build.set()
    assert harness.next_report() is built
    results = [harness.next_report() for _ in range(5)]
    assert [(done.iteration, done.received_ns) for done in results] == [
        (iteration, iteration) for iteration in range(5)
    ]


def test_the_queue_takes_its_bound_and_not_one_plan_more(built: Built, harness_of: Callable[[Built], Harness]) -> None:
    harness = harness_of(built)
    connection = harness.connection(built)
    assert [harness.thread.submit(connection, plan(iteration), 0) for iteration in range(9)] == [True] * 8 + [False]


def test_plans_of_a_lost_connection_are_skipped(built: Built, harness_of: Callable[[Built], Harness]) -> None:
    harness = harness_of(built)
    lost, fresh = harness.connection(built), harness.connection(built)
    harness.thread.submit(lost, plan(0), 0)
    harness.thread.submit(fresh, msgspec.structs.replace(plan(0), epoch=7), 0)
    lost.is_lost = True
    harness.may_build.set()
    assert harness.next_report() is built
    done = harness.next_report()
    assert isinstance(done, IterationDone)
    assert done.epoch == 7
    assert lost.state.num_slots_in_use == 0


def test_a_failing_forward_pass_is_reported_and_ends_the_thread(
    built: Built, harness_of: Callable[[Built], Harness]
) -> None:
    # Limits that promise positions beyond the model's rotation table: a bug of ours, as it might be.
    wrong = dataclasses.replace(built, limits=dataclasses.replace(built.limits, max_model_len=1000))
    harness = harness_of(wrong)
    harness.may_build.set()
    assert harness.next_report() is wrong
    harness.thread.submit(harness.connection(wrong), plan(0, num_tokens=70), 0)
    assert isinstance(harness.next_report(), IndexError)


def test_a_stop_drops_what_is_queued(built: Built, harness_of: Callable[[Built], Harness]) -> None:
    harness = harness_of(built)
    harness.waits_for_stop = True  # What is being built when the stop comes is the last thing that is done.
    harness.thread.submit(harness.connection(built), plan(0), 0)
    harness.may_build.set()
    harness.thread.stop()
    assert harness.reports.empty()
