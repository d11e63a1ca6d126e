"""A simulated worker: it obeys plans one after another, computes nothing, and takes its time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.ids import RequestId, Slot, WorkerId
from common.messages.plans import IterationDone
from loadtest.simulate.truth import Disturbance, Truth, Work
from services.scheduler.events import RunIteration

EOS = 2
ANY_TOKEN = 7
"""What it samples otherwise. Nobody looks at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a pipeline; without pipelining, the whole model."""

    truth: Truth
    send_ns_per_token: float = 0.0  # what the next stage is sent
    send_start_ns: float = 0.0


class SimulatedWorker:
    """Answers each plan with the result that it will bring, and when.

    Plans run in the order in which they came. A pipeline of n stages holds n plans at a time, each stage one of them;
    a plan whose decode needs a token that a plan before it samples enters the first stage when that one has left the
    last. A stage that has a plan and waits, for the stage before it or the first one for such a token, is a bubble, as
    a real worker counts it.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        stages: Sequence[Stage],
        disturbance: Disturbance,
        total_len_of: Mapping[RequestId, int] | None = None,
    ) -> None:
        """total_len_of tells at which length of prompt and output together a request draws its end of sequence;
        absent, no request does: its max_tokens ends it."""
        self.worker_id = worker_id
        self.busy_ns = 0
        self.bubble_ns = 0
        self.last_finished_ns = 0
        self._stages = stages
        self._disturbance = disturbance
        self._total_len_of = total_len_of
        self._free_ns = [0] * len(stages)
        self._num_computed: dict[Slot, int] = {}
        self._total_len: dict[Slot, int] = {}
        self._sampled_ns: dict[Slot, int] = {}  # only of a pipeline: when the latest sample of a slot is there

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def run(self, plan: RunIteration, received_ns: int) -> IterationDone:
        """Return the result of a plan that arrives now, after those before it."""
        self._note_slots(plan)
        work, slots, token_ids = self._rows(plan)
        ready_ns = received_ns
        is_pipeline = len(self._stages) > 1
        if is_pipeline:
            ready_ns = max([received_ns, *(self._sampled_ns.get(decode.slot, 0) for decode in plan.decodes)])
        started_ns, finished_ns, device_ns, bubble_ns = self._pass(work, received_ns, ready_ns)
        if is_pipeline:
            self._sampled_ns.update(dict.fromkeys(slots, finished_ns))
        self.busy_ns += device_ns
        self.bubble_ns += bubble_ns
        self.last_finished_ns = finished_ns
        return IterationDone(
            epoch=plan.epoch,
            iteration=plan.iteration,
            slots=slots,
            token_ids=token_ids,
            received_ns=received_ns,
            started_ns=started_ns,
            finished_ns=finished_ns,
            device_ns=device_ns,
            bubble_ns=bubble_ns,
        )

    def _note_slots(self, plan: RunIteration) -> None:
        for slot in plan.released:
            self._num_computed.pop(slot, None)
            self._sampled_ns.pop(slot, None)
        if self._total_len_of is not None:
            for request in plan.introduced:
                self._total_len[request.slot] = self._total_len_of[request.request_id]

    def _rows(self, plan: RunIteration) -> tuple[Work, tuple[Slot, ...], tuple[int, ...]]:
        work = Work()
        num_computed = self._num_computed
        slots = [decode.slot for decode in plan.decodes]
        sum_of_starts = 0
        for slot in slots:
            start = num_computed[slot]
            sum_of_starts += start
            num_computed[slot] = start + 1
        if slots:
            work.load.add_decodes(len(slots), sum_of_starts)
        for chunk in plan.chunks:
            num_computed[chunk.slot] = chunk.start + chunk.num_tokens
            work.load.add_chunk(chunk.start, chunk.num_tokens, is_sampled=chunk.is_sampled)
            work.chunks.append((chunk.start, chunk.num_tokens))
            if chunk.is_sampled:
                slots.append(chunk.slot)
        if self._total_len_of is None:
            return work, tuple(slots), (ANY_TOKEN,) * len(slots)
        # A request's new token makes it one longer than what is computed.
        token_ids = [EOS if num_computed[slot] + 1 >= self._total_len[slot] else ANY_TOKEN for slot in slots]
        return work, tuple(slots), tuple(token_ids)

    def _pass(self, work: Work, received_ns: int, ready_ns: int) -> tuple[int, int, int, int]:
        """Go through the stages: when the first starts, when the last ends, and how long devices computed and waited
        with the plan in hand."""
        started_ns = max(ready_ns, self._free_ns[0])
        factor = self._disturbance.factor(started_ns)
        device_ns = bubble_ns = 0
        at_ns = ready_ns
        for index, stage in enumerate(self._stages):
            is_last = index == len(self._stages) - 1
            took_ns = max(1, round(factor * stage.truth.time_ns(work if is_last else work.without_head())))
            bubble_ns += max(0, at_ns - max(received_ns, self._free_ns[index]))
            at_ns = max(at_ns, self._free_ns[index]) + took_ns
            self._free_ns[index] = at_ns
            device_ns += took_ns
            if not is_last:
                at_ns += round(stage.send_start_ns + stage.send_ns_per_token * work.load.num_tokens)
        return started_ns, at_ns, device_ns, bubble_ns
