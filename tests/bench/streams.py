"""A core with many streams on one large worker, moved on by hand."""

from collections.abc import Iterable

from common.cost.shapes import SHAPES
from common.ids import InstanceId, RequestId, TokenizerId, WorkerId, pack_ids
from common.messages.cards import ModelCard, WorkerCard
from common.messages.plans import IterationDone
from common.messages.requests import Sampling
from common.messages.streams import RequestArrived
from services.scheduler.core import SchedulerCore
from services.scheduler.events import Effect, RunIteration, WorkerJoined, WorkerReported
from services.scheduler.limits import Limits

WORKER = WorkerId(InstanceId("worker"))


def card(num_blocks: int) -> WorkerCard:
    return WorkerCard(
        model=ModelCard(name="m", max_model_len=1 << 20, vocab_size=32000, eos_token_ids=(2,)),
        shape=SHAPES["mistral-7b"],
        device="simulated",
        device_kind="h200",
        dtype="bfloat16",
        attention="none",
        is_batch_invariant=True,
        block_size=16,
        num_blocks=num_blocks,
        max_num_slots=2048,
        max_chunk_tokens=8192,
    )


class Streams:
    """All have begun when it is made, and none ends."""

    def __init__(self, num_streams: int, prompt_len: int, num_blocks: int = 200_000) -> None:
        self.limits = Limits(tbt_target_ns=10**9, max_running=2048, max_waiting=4096, depth=1, queue_timeout_ns=10**15)
        self.core = SchedulerCore(self.limits)
        self.now_ns = 0
        self.plan: RunIteration | None = None
        self.core.step(WorkerJoined(worker_id=WORKER, card=card(num_blocks)), self.now_ns)
        for index in range(num_streams):
            self.arrive(f"cmpl-{index:024x}-0", prompt_len)
        while not self._all_decode(num_streams):
            self.note(self.core.step(self.result(), self.now_ns))

    def _all_decode(self, num_streams: int) -> bool:
        return self.plan is None or len(self.plan.decodes) >= num_streams

    def arrive(self, name: str, length: int) -> None:
        arrived = RequestArrived(
            request_id=RequestId(name),
            tokenizer_id=TokenizerId(InstanceId("tokenizer")),
            attempt=1,
            token_ids=pack_ids([hash(name) % 30000, *range(length - 1)]),
            num_prompt_tokens=length,
            max_tokens=100_000,
            seed=0,
            sampling=Sampling(),
        )
        self.note(self.core.step(arrived, self.now_ns))

    def result(self) -> WorkerReported:
        """The result of the plan in flight, as long after it as was predicted."""
        plan = self.plan
        assert plan is not None
        self.now_ns += plan.predicted_ns
        slots = (*(row.slot for row in plan.decodes), *(chunk.slot for chunk in plan.chunks if chunk.is_sampled))
        done = IterationDone(
            epoch=0,
            iteration=plan.iteration,
            slots=slots,
            token_ids=tuple((7919 * plan.iteration + 31 * slot) % 30000 + 10 for slot in slots),
            received_ns=self.now_ns - plan.predicted_ns,
            started_ns=self.now_ns - plan.predicted_ns,
            finished_ns=self.now_ns,
            device_ns=plan.predicted_ns,
        )
        self.plan = None
        return WorkerReported(worker_id=WORKER, report=done)

    def note(self, effects: Iterable[Effect]) -> None:
        """Remember the plan among the effects."""
        for effect in effects:
            if isinstance(effect, RunIteration):
                self.plan = effect
