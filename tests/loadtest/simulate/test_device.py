"""The simulated worker: what it answers, and when."""

import random
from collections.abc import Mapping

from common.ids import InstanceId, RequestId, Slot, WorkerId
from common.messages.plans import NewRequest
from common.messages.requests import Sampling
from loadtest.simulate.device import EOS, SimulatedWorker, Stage
from loadtest.simulate.truth import Disturbance, Work
from services.scheduler.events import Bound, Chunk, Decode, RunIteration

WORKER = WorkerId(InstanceId("worker-0"))


class MicrosecondPerToken:
    """A device that is easy to reckon with."""

    def time_ns(self, work: Work) -> float:
        return 1000.0 * work.load.num_tokens


def worker_of(num_stages: int = 1, total_len_of: Mapping[RequestId, int] | None = None) -> SimulatedWorker:
    stages = [Stage(truth=MicrosecondPerToken())] * num_stages
    return SimulatedWorker(WORKER, stages, Disturbance(random.Random(0)), total_len_of)


def plan_of(
    iteration: int,
    *,
    decodes: tuple[int, ...] = (),
    chunks: tuple[Chunk, ...] = (),
    introduced: tuple[NewRequest, ...] = (),
) -> RunIteration:
    return RunIteration(
        worker_id=WORKER,
        epoch=0,
        iteration=iteration,
        decodes=tuple(Decode(RequestId(f"r{slot}"), Slot(slot)) for slot in decodes),
        chunks=chunks,
        introduced=introduced,
        predicted_ns=0,
        allowed_ns=None,
        bound=Bound.NOTHING,
    )


def chunk_of(slot: int, start: int, num_tokens: int, *, is_sampled: bool) -> Chunk:
    return Chunk(RequestId(f"r{slot}"), Slot(slot), start, num_tokens, is_sampled)


def test_plans_run_one_after_another() -> None:
    worker = worker_of()
    first = worker.run(plan_of(0, chunks=(chunk_of(0, 0, 10, is_sampled=True),)), received_ns=100)
    second = worker.run(plan_of(1, decodes=(0,)), received_ns=200)
    third = worker.run(plan_of(2, decodes=(0,)), received_ns=50_000)
    assert (first.started_ns, first.finished_ns) == (100, 10_100)
    assert (second.started_ns, second.finished_ns) == (10_100, 11_100)
    assert (third.started_ns, third.finished_ns) == (50_000, 51_000)
    assert worker.busy_ns == 12_000


def test_it_samples_for_decodes_first_and_then_for_prompts_that_are_complete() -> None:
    worker = worker_of()
    worker.run(plan_of(0, chunks=(chunk_of(4, 0, 3, is_sampled=True),)), received_ns=0)
    chunks = (chunk_of(1, 0, 5, is_sampled=False), chunk_of(2, 0, 5, is_sampled=True))
    done = worker.run(plan_of(1, decodes=(4,), chunks=chunks), received_ns=0)
    assert done.slots == (4, 2)
    assert len(done.token_ids) == 2
    assert EOS not in done.token_ids


def test_a_request_draws_its_end_at_its_length() -> None:
    introduced = NewRequest(
        slot=Slot(0),
        request_id=RequestId("r0"),
        token_ids=b"",
        num_prompt_tokens=3,
        seed=0,
        sampling=Sampling(),
        block_table=b"",
    )
    worker = worker_of(total_len_of={RequestId("r0"): 5})
    first = worker.run(
        plan_of(0, chunks=(chunk_of(0, 0, 3, is_sampled=True),), introduced=(introduced,)), received_ns=0
    )
    second = worker.run(plan_of(1, decodes=(0,)), received_ns=0)
    assert EOS not in first.token_ids
    assert second.token_ids == (EOS,)


def test_stages_of_a_pipeline_work_on_different_plans_at_a_time() -> None:
    worker = worker_of(num_stages=2)
    first = worker.run(plan_of(0, chunks=(chunk_of(0, 0, 10, is_sampled=False),)), received_ns=0)
    second = worker.run(plan_of(1, chunks=(chunk_of(0, 10, 10, is_sampled=False),)), received_ns=0)
    assert (first.started_ns, first.finished_ns) == (0, 20_000)
    assert (second.started_ns, second.finished_ns) == (10_000, 30_000), "one stage's time later"
    assert first.bubble_ns == 10_000, "the second stage had the plan and waited for the first"
    assert second.bubble_ns == 0


def test_a_decode_enters_a_pipeline_when_the_token_before_it_has_left() -> None:
    worker = worker_of(num_stages=2)
    first = worker.run(plan_of(0, chunks=(chunk_of(0, 0, 10, is_sampled=True),)), received_ns=0)
    second = worker.run(plan_of(1, decodes=(0,)), received_ns=0)
    assert second.started_ns == first.finished_ns
    assert second.bubble_ns == 10_000 + 1_000, "the first stage waited for the token, then the second for the first"


def test_a_pipeline_without_plans_idles_and_that_is_no_bubble() -> None:
    worker = worker_of(num_stages=2)
    worker.run(plan_of(0, chunks=(chunk_of(0, 0, 10, is_sampled=False),)), received_ns=0)
    second = worker.run(plan_of(1, chunks=(chunk_of(0, 10, 10, is_sampled=False),)), received_ns=50_000)
    assert second.bubble_ns == 10_000
    assert (worker.busy_ns, worker.bubble_ns) == (40_000, 20_000)
