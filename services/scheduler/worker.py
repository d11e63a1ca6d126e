"""One worker as the scheduler sees it: its blocks and slots, the requests it holds, the plans in flight, its pace."""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from common.cost.devices import DEVICES
from common.cost.fit import Fit, SavedFit
from common.cost.load import Load
from common.cost.roofline import Roofline, Terms
from common.ids import Slot, WorkerId
from common.messages.cards import WorkerCard
from common.messages.plans import IterationDone, KeptIteration
from common.traceparent import is_sampled
from services.scheduler.account import Account, gap_ns, last_token
from services.scheduler.events import Bound, RunIteration
from services.scheduler.kv.blocks import BlockPool
from services.scheduler.limits import Limits
from services.scheduler.margin import Margin
from services.scheduler.request import Placement, Request

PROFILE_ROUNDS = 3
"""How often the start-up profile is shown to the fit: its few points stand for medians, not single runs."""
MAX_KEPT_ITERATIONS = 8
"""Of a late gap, how many iterations' spans a plan asks for: the last ones."""
MAX_KEPT_STREAMS = 8
"""For how many streams that were late together; with the bound above, 64 rows of 70 bytes in one plan."""
SILENT_TIMES = 10.0
"""Of what a plan was predicted to take, by how much it is overdue when its worker counts as silent."""
LEAST_SILENT_NS = 1_000_000_000
"""The least of that: pauses of machines and first runs of kernels are shorter, most of them."""
PACE_SHARE = 0.05
"""Weight of the newest iteration in the running prefill rate."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan that has left. decodes and chunks are parallel to the plan's."""

    plan: RunIteration
    decodes: list[Placement]
    chunks: list[Placement]
    denied: list[Placement]  # streams that are not in it for want of a block
    sampled: list[Placement]  # that it brings a token: all decodes, and the chunks that end a prompt
    terms: Terms
    decode_ns: int  # of the predicted time, what decodes alone would take
    num_prefill_tokens: int
    micro_batch: int  # whose streams decodes are
    sent_ns: int  # when it left
    timeout_ns: int  # by then its result must be here
    end_ns: int = 0  # when it will end, by the scheduler's clock; once its result is here, when that came
    interval_ns: int = 0  # of that, what lies behind the end of the plan before it, and behind sent_ns

    @property
    def placements(self) -> list[Placement]:
        """All that it names; none may be preempted until it has returned."""
        return [*self.decodes, *self.chunks]


class Worker:
    """Bookkeeping only; what to do with it is the core's."""

    def __init__(self, worker_id: WorkerId, card: WorkerCard, order: int, limits: Limits, fit: SavedFit | None) -> None:
        self.worker_id = worker_id
        self.card = card
        self.num_stages = card.pipeline_parallel
        self.order = order  # of joining; ties are broken by it
        self.eos_ids = frozenset(card.model.eos_token_ids)
        self.pool = BlockPool(card.num_blocks, card.block_size)
        self.roofline = Roofline(card.shape, DEVICES[card.device_kind], card.tensor_parallel)
        self.fit = Fit(fit)
        self.margin = Margin(limits.late_share, limits.tbt_target_ns)
        self.account = Account(order)
        self.running: list[Request] = []  # by rank; placed here and not ended
        self.in_flight: deque[InFlight] = deque()
        self.last_finished_ns = 0  # by the worker's clock
        self.has_parked = False  # some placement is parked
        self.next_micro_batch = 0  # whose turn it is
        self.last_was_prefill = [False] * self.num_stages  # of each micro-batch: its latest plan computed prompts
        self.epoch = 0
        self.next_iteration = 0
        self.num_refusals = 0  # in a row
        self.num_gaps = 0  # between tokens of one stream, the later of which it brought
        self.num_late = 0  # of those, above the stream's target
        self._prefill_tokens = self._prefill_ns = 0.0  # of iterations full of prefill, the latest counting most
        self.kept: list[KeptIteration] = []  # to be told with the next plan
        self.released: list[Slot] = []  # to be told with the next plan
        self._free_slots: list[Slot] = [Slot(slot) for slot in range(card.max_num_slots)]  # a heap: lowest first
        self._learn_profile()

    @property
    def prefill_tokens_per_s(self) -> float:
        """The pace at which it has read prompts of late; 0 while nothing is known."""
        return self._prefill_tokens * 1e9 / self._prefill_ns if self._prefill_ns else 0.0

    @property
    def capacity(self) -> int:
        """Tokens whose KV it can hold."""
        return self.pool.num_blocks * self.pool.block_size

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def silent_from_ns(self) -> float:
        """When it begins to count as silent, unless a result comes before; never while no plan is in flight."""
        if not self.in_flight:
            return inf
        flight = self.in_flight[0]
        return flight.end_ns + max(LEAST_SILENT_NS, SILENT_TIMES * flight.plan.predicted_ns)

    def turns(self, depth: int) -> list[int]:
        """Micro-batches with fewer than depth plans in flight, from the one whose turn it is."""
        turns = [(self.next_micro_batch + later) % self.num_stages for later in range(self.num_stages)]
        in_flight = [flight.micro_batch for flight in self.in_flight]
        return [micro_batch for micro_batch in turns if in_flight.count(micro_batch) < depth]

    def start_ns(self, micro_batch: int, now_ns: int) -> int:
        """When a plan that leaves now will start: when the first stage is through with those in flight, and the last
        one has drawn its micro-batch's tokens."""
        return self._start_ns(self.in_flight, micro_batch, now_ns)

    def ahead_ns(self, start_ns: int) -> int:
        """How long the plan in flight that left last will still take when the next one starts."""
        return max(0, self.in_flight[-1].end_ns - start_ns) if self.in_flight else 0

    def launch(self, flight: InFlight, start_ns: int) -> None:
        """A plan leaves, and will start then."""
        self._foresee(flight, start_ns, self.in_flight[-1].end_ns if self.in_flight else flight.sent_ns)
        self.next_iteration += 1
        self.released.clear()
        self.kept.clear()
        self.next_micro_batch = (flight.micro_batch + 1) % self.num_stages
        self.last_was_prefill[flight.micro_batch] = bool(flight.chunks)
        self.in_flight.append(flight)

    def predict_ns(self, load: Load) -> float:
        """How long an iteration will take here."""
        return self.fit.predict_ns(self.roofline.terms(load))

    def observe(self, flight: InFlight, done: IterationDone, now_ns: int, limits: Limits) -> None:
        """Learn from a result that is in the account: the pace, whose gaps were late, and when the plans behind it will
        end."""
        interval_ns = self._interval_ns(done)
        self.fit.learn(flight.terms, self.took_ns(done))
        self.last_finished_ns = done.finished_ns
        if flight.num_prefill_tokens and flight.plan.bound is not Bound.NOTHING:  # It could have read more, else.
            self.note_pace(flight.num_prefill_tokens, interval_ns)
        flight.end_ns = now_ns
        before = [flight]
        for later in self.in_flight:
            start_ns = self._start_ns(before, later.micro_batch, later.sent_ns)
            self._foresee(later, start_ns, before[-1].end_ns)
            before.append(later)
        self._count_gaps(flight, limits.ring_allowance_ns)

    def took_ns(self, done: IterationDone) -> int:
        """How long the newest result's iteration took, as predict_ns would have it: all stages one after another."""
        return done.device_ns if self.num_stages > 1 else self._interval_ns(done)

    def _interval_ns(self, done: IterationDone) -> int:
        """Of the time since the result before it, what the worker had the plan for."""
        return done.finished_ns - max(self.last_finished_ns, done.received_ns)

    def _start_ns(self, before: Iterable[InFlight], micro_batch: int, sent_ns: int) -> int:
        """When a plan starts behind those before it. Stages are taken to be equally long."""
        start_ns = sent_ns
        for flight in before:
            free_ns = flight.end_ns
            if flight.micro_batch != micro_batch or not flight.sampled:
                free_ns -= flight.plan.predicted_ns * (self.num_stages - 1) // self.num_stages
            start_ns = max(start_ns, free_ns)
        return start_ns

    def _foresee(self, flight: InFlight, start_ns: int, before_ns: int) -> None:
        """Say when a plan will end that starts at start_ns, while the one before it ends at before_ns. In a pipeline
        it goes through all stages, and through the last one behind that other."""
        predicted_ns = flight.plan.predicted_ns
        flight.end_ns = max(start_ns + predicted_ns, before_ns + predicted_ns // self.num_stages)
        flight.interval_ns = flight.end_ns - max(before_ns, flight.sent_ns)

    def _count_gaps(self, flight: InFlight, allowance_ns: int) -> None:
        """Count the gaps that end with a result, and the late ones among them; teach the margin by those of decodes."""
        latest = self.account.latest
        late: list[Placement] = []
        num_gaps = 0
        for placement in flight.decodes:
            if (tally := placement.tally) is not None:
                num_gaps += 1
                if latest.finished_ns - tally.finished_ns > placement.request.tbt_target_ns - allowance_ns:
                    late.append(placement)
        if num_gaps and flight.plan.bound is Bound.DEADLINE:
            self.margin.learn(len(late) / num_gaps)
        # What was computed again brings its next token with a chunk. No margin would have made that gap shorter.
        for placement in flight.sampled[len(flight.decodes) :]:
            since = last_token(placement)
            if since is not None and not placement.request.has_ended:
                num_gaps += 1
                if gap_ns(since, latest) > placement.request.tbt_target_ns - allowance_ns:
                    late.append(placement)
        self.num_gaps += num_gaps
        self.num_late += len(late)
        if late:
            self._keep_iterations(late)

    def _keep_iterations(self, late: Iterable[Placement]) -> None:
        """Have the worker write spans of the iterations in a late gap, for each sampled stream that has one."""
        latest = self.account.latest
        num_streams = 0
        for placement in late:
            since, traceparent = last_token(placement), placement.request.arrived.traceparent
            if since is None or not is_sampled(traceparent):
                continue
            is_here = (since.worker_order, since.epoch) == (latest.worker_order, latest.epoch)
            first = max(latest.iteration - MAX_KEPT_ITERATIONS + 1, since.iteration + 1 if is_here else 0)
            self.kept += [
                KeptIteration(latest.epoch, iteration, traceparent) for iteration in range(first, latest.iteration + 1)
            ]
            num_streams += 1
            if num_streams == MAX_KEPT_STREAMS:
                break
        del self.kept[: -MAX_KEPT_ITERATIONS * MAX_KEPT_STREAMS]  # Of results between two plans, the latest.

    def take_slot(self) -> Slot:
        return heapq.heappop(self._free_slots)

    def give_back(self, placement: Placement) -> None:
        """Free a placement's slot and blocks. No plan in flight may name it."""
        assert placement.num_in_flight == 0, "blocks of a request in flight"
        heapq.heappush(self._free_slots, placement.slot)
        if placement.is_introduced:
            self.released.append(placement.slot)
        self.pool.num_reserved -= placement.num_reserved
        placement.num_reserved = 0
        self.pool.give_back(placement.block_table)

    def num_prefill_tokens_due(self) -> int:
        """Tokens of running requests that are still to be prefilled. Those in flight count: else a worker whose plan
        has left would seem nearer to its end than one whose plan is made, and each leave newcomers to the other."""
        return sum(
            max(0, placement.prefill_len - placement.num_computed)
            for placement in (request.placed for request in self.running)
        )

    def num_blocks_promised(self, requests: Iterable[Request]) -> int:
        """Free blocks, outside the reserve, that those of requests that prefill will still take until their first
        token."""
        promised = 0
        for request in requests:
            placement = request.placed
            if not placement.is_decoding and not placement.is_pinned:
                needed = self.pool.blocks_for(min(placement.prefill_len + 1, request.max_len - 1))
                promised += max(0, needed - len(placement.block_table))
        return promised

    def note_pace(self, num_prefill_tokens: int, took_ns: int) -> None:
        """Take an iteration that read as much as fitted into the running rate."""
        self._prefill_tokens += num_prefill_tokens - PACE_SHARE * self._prefill_tokens
        self._prefill_ns += max(1, took_ns) - PACE_SHARE * self._prefill_ns

    def _learn_profile(self) -> None:
        for _ in range(PROFILE_ROUNDS):
            for point in self.card.profile:
                load = Load()
                load.add_decodes(point.num_decodes, point.num_decodes * point.decode_context)
                if point.num_tokens > point.num_decodes:
                    load.add_chunk(0, point.num_tokens - point.num_decodes, is_sampled=True)
                self.fit.learn(self.roofline.terms(load), point.iteration_ns)
