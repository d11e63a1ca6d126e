"""The smallest world around a scheduler core: workers that obey plans, tokenizers that note what they are told.

Workers are played from the messages that would travel, by their documented meaning (common.messages.plans.Plan): the
encoder's deltas are undone here, and every position, block and slot is checked on the way.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Protocol

from common.cost.shapes import SHAPES
from common.ids import InstanceId, RequestId, Slot, TokenizerId, WorkerId, pack_ids, unpack_ids
from common.messages.cards import ModelCard, ProfilePoint, WorkerCard
from common.messages.gaps import NO_GAP, WorkerGap
from common.messages.plans import IterationDone, NewRequest, Plan, PlanRefused, SlotScores
from common.messages.requests import Cancel, RequestEnded, RequestRejected, Sampling, Stamps
from common.messages.streams import RequestArrived, StopReached, StreamBatch, TokensSampled
from common.wire.codec import decode, encode
from services.scheduler.core import SchedulerCore
from services.scheduler.encoder import PlanEncoder
from services.scheduler.events import (
    DismissWorker,
    Effect,
    Event,
    RunIteration,
    SendStreams,
    TimerFired,
    TokenizerLost,
    WakeAt,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from services.scheduler.limits import Limits
from services.scheduler.worker import Worker

EOS = 2
CLOCK_OFFSET_NS = 10**15
"""Between the clocks of two workers."""
TOKENIZER = TokenizerId(InstanceId("tokenizer-0"))


def token_at(request_id: str, position: int) -> int:
    """What a worker samples at a position: a function of the request and the position alone, never EOS."""
    return 10 + (sum(request_id.encode()) * 31 + position * 7) % 1000


@dataclass
class Row:
    """One row of an iteration, as the worker computed it."""

    request_id: RequestId
    start: int
    num_tokens: int
    is_sampled: bool


@dataclass
class Resident:
    """One slot of a worker."""

    request: NewRequest
    token_ids: list[int]
    block_table: list[int]
    num_computed: int = 0


class Device(Protocol):
    """What runs plans: rows computed, and a token for each sampled slot."""

    def run(self, plan: Plan) -> tuple[list[Row], list[tuple[Slot, int]]]: ...


@dataclass
class FakeDevice:
    """A worker that computes nothing but keeps the books that a real one keeps, and checks the plans against them."""

    card: WorkerCard
    epoch: int = 0
    next_iteration: int = 0
    residents: dict[Slot, Resident] = field(default_factory=dict)
    decoding: list[Slot] = field(default_factory=list)
    kv: dict[int, tuple[int, ...]] = field(default_factory=dict)  # block -> all tokens up to the end of what it holds

    def run(self, plan: Plan) -> tuple[list[Row], list[tuple[Slot, int]]]:
        if plan.epoch != self.epoch:
            assert plan.epoch > self.epoch
            self.epoch, self.next_iteration = plan.epoch, 0
            self.residents.clear()
            self.decoding.clear()
        assert plan.iteration == self.next_iteration
        self.next_iteration += 1
        for slot in plan.released:
            del self.residents[slot]
            if slot in self.decoding:
                self.decoding.remove(slot)
        for request in plan.introduced:
            assert request.slot not in self.residents
            blocks = list(unpack_ids(request.block_table))
            self.residents[request.slot] = Resident(request, list(unpack_ids(request.token_ids)), blocks)
        for grown in plan.grown:
            self.residents[grown.slot].block_table.extend(grown.block_ids)
        for slot in plan.decode_removed:
            self.decoding.remove(slot)
        for slot in plan.decode_added:
            assert slot not in self.decoding
            self.decoding.append(slot)
        work = [(slot, self.residents[slot].num_computed, 1, True) for slot in self.decoding]
        work += [(chunk.slot, chunk.start, chunk.num_tokens, chunk.is_sampled) for chunk in plan.chunks]
        assert len({slot for slot, *_ in work}) == len(work), "one row for each slot"
        assert sum(num_tokens for _, _, num_tokens, _ in work) <= self.card.max_chunk_tokens, "no more than it takes"
        rows, sampled = [], []
        for slot, start, num_tokens, is_sampled in work:
            resident = self.residents[slot]
            self._compute(resident, start, num_tokens)
            rows.append(Row(resident.request.request_id, start, num_tokens, is_sampled))
            if is_sampled:
                assert start + num_tokens == len(resident.token_ids)
                token = token_at(resident.request.request_id, len(resident.token_ids))
                resident.token_ids.append(token)
                sampled.append((slot, token))
        return rows, sampled

    def _compute(self, resident: Resident, start: int, num_tokens: int) -> None:
        size = self.card.block_size
        end = start + num_tokens
        assert num_tokens > 0
        assert end <= len(resident.token_ids), "only known tokens are computed"
        assert end <= len(resident.block_table) * size, "every position has its block"
        # Reading the cache: what lies before the chunk must be the KV of this request's own tokens, in order.
        for index in range(-(-start // size)):
            until = min((index + 1) * size, start)
            assert self.kv[resident.block_table[index]][:until] == tuple(resident.token_ids[:until])
        for index in range(start // size, -(-end // size)):
            self.kv[resident.block_table[index]] = tuple(resident.token_ids[: min((index + 1) * size, end)])
        resident.num_computed = end


class World:
    """A core, its workers and one or more tokenizers, moved by hand."""

    def __init__(
        self,
        *,
        token_budget: int | None = 8,
        block_size: int = 4,
        num_blocks: int = 64,
        num_workers: int = 1,
        max_num_slots: int = 16,
        max_chunk_tokens: int = 2048,
        pipeline_parallel: int = 1,
        make_device: "Callable[[WorkerCard], Device] | None" = None,
        **limits: float | str | None,
    ) -> None:
        settings = {
            "tbt_target_ns": 100_000_000,
            "depth": 1,
            "fixed_token_budget": token_budget,
            "min_prefill_tokens": 1,
        }
        self.core = SchedulerCore(Limits(**(settings | limits)))  # type: ignore[arg-type]
        self.model = ModelCard(name="tiny", max_model_len=4096, vocab_size=2000, eos_token_ids=(EOS,))
        self.block_size, self.num_blocks, self.max_num_slots = block_size, num_blocks, max_num_slots
        self.max_chunk_tokens = max_chunk_tokens
        self.pipeline_parallel = pipeline_parallel
        self.now_ns = 0
        self._make_device = make_device or FakeDevice
        self.devices: dict[WorkerId, Device] = {}
        self.cards: dict[WorkerId, WorkerCard] = {}
        self.encoders: dict[WorkerId, PlanEncoder] = {}
        self.plans: dict[WorkerId, deque[Plan]] = {}
        self.iterations: list[RunIteration] = []
        self.effects: list[Effect] = []
        self.output: dict[str, list[int]] = {}
        self.terminals: dict[str, list[RequestEnded | RequestRejected]] = {}
        self.stamps: dict[str, Stamps] = {}  # of each request's last token
        self.gaps: dict[str, list[WorkerGap]] = {}  # between its tokens
        self.stopped: set[str] = set()
        self.queued: list[str] = []
        self.wake_due_ns: int | None = None
        for _ in range(num_workers):
            self.join()

    # --- events

    def step(self, event: Event) -> tuple[Effect, ...]:
        effects = self.core.step(event, self.now_ns)
        self.effects.extend(effects)
        for effect in effects:
            match effect:
                case RunIteration():
                    self.iterations.append(effect)
                    plan = decode(encode(self.encoders[effect.worker_id].encode(effect)))
                    assert isinstance(plan, Plan)
                    self.plans[effect.worker_id].append(plan)
                case SendStreams():
                    self._note(effect.batch)
                case DismissWorker():
                    self._forget(effect.worker_id)
                case WakeAt():
                    self.wake_due_ns = effect.due_ns
        self.check()
        return effects

    def join(
        self,
        *,
        num_blocks: int | None = None,
        profile: tuple[ProfilePoint, ...] = (),
        worker_id: WorkerId | None = None,
    ) -> WorkerId:
        worker_id = worker_id or WorkerId(InstanceId(f"worker-{self.core._num_joined}"))
        card = WorkerCard(
            model=self.model,
            shape=SHAPES["smollm2"],
            device="none",
            device_kind="cpu",
            pipeline_parallel=self.pipeline_parallel,
            dtype="float32",
            attention="none",
            is_batch_invariant=True,
            block_size=self.block_size,
            num_blocks=self.num_blocks if num_blocks is None else num_blocks,
            max_num_slots=self.max_num_slots,
            max_chunk_tokens=self.max_chunk_tokens,
            profile=profile,
        )
        self.devices[worker_id] = self._make_device(card)
        self.cards[worker_id] = card
        self.encoders[worker_id] = PlanEncoder()
        self.plans[worker_id] = deque()
        self.step(WorkerJoined(worker_id=worker_id, card=card))
        return worker_id

    def lose(self, worker_id: WorkerId) -> None:
        self._forget(worker_id)
        self.step(WorkerLost(worker_id=worker_id, detail="killed"))

    def arrive(
        self,
        name: str,
        *,
        prompt_len: int,
        max_tokens: int = 16,
        output: int = 0,
        priority: int = 0,
        tokenizer_id: TokenizerId = TOKENIZER,
        sampling: Sampling | None = None,
        deadline_ms: float | None = None,
        tbt_target_ms: float | None = None,
        tokens: list[int] | None = None,
        cache_salt: str = "",
        seed: int = 0,
        traceparent: str = "",
    ) -> None:
        """A request arrives, with the first tokens of its output known already if it ran elsewhere before."""
        prompt = tokens or [token_at(name, -position) for position in range(prompt_len)]
        known = [*prompt, *(token_at(name, prompt_len + i) for i in range(output))]
        self.output.setdefault(name, known[prompt_len:])
        self.step(
            RequestArrived(
                request_id=RequestId(name),
                tokenizer_id=tokenizer_id,
                attempt=1,
                token_ids=pack_ids(known),
                num_prompt_tokens=prompt_len,
                max_tokens=max_tokens,
                seed=seed,
                sampling=sampling or Sampling(temperature=0.0),
                priority=priority,
                deadline_ms=deadline_ms,
                tbt_target_ms=tbt_target_ms,
                cache_salt=cache_salt,
                traceparent=traceparent,
            )
        )

    def cancel(self, name: str) -> None:
        self.step(Cancel(request_ids=(RequestId(name),)))

    def stop(self, name: str, num_output_tokens: int) -> None:
        if name not in self.terminals:
            self.stopped.add(name)
        self.step(StopReached(request_id=RequestId(name), num_output_tokens=num_output_tokens))

    def lose_tokenizer(self, tokenizer_id: TokenizerId = TOKENIZER) -> None:
        self.step(TokenizerLost(tokenizer_id=tokenizer_id))

    def finish_iteration(
        self, worker_id: WorkerId | None = None, *, idle_ns: int = 1_000_000, took_ns: int = 0
    ) -> dict[str, int]:
        """The oldest plan in flight reaches the worker after idle_ns and returns after took_ns more; tokens computed
        by request."""
        worker_id = worker_id or next(worker for worker, plans in self.plans.items() if plans)
        plan = self.plans[worker_id].popleft()
        rows, sampled = self.devices[worker_id].run(plan)
        self._report(worker_id, plan, sampled, idle_ns, took_ns)
        return {row.request_id: row.num_tokens for row in rows}

    def refuse(self, worker_id: WorkerId) -> None:
        """The worker refuses the oldest plan in flight, and ignores the rest of the epoch."""
        plan = self.plans[worker_id].popleft()
        self.plans[worker_id].clear()
        refused = PlanRefused(epoch=plan.epoch, iteration=plan.iteration, detail="said so")
        self.step(WorkerReported(worker_id=worker_id, report=refused))

    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        if self.wake_due_ns is not None and self.wake_due_ns <= self.now_ns:
            self.wake_due_ns = None
            self.step(TimerFired())

    def drain(self, max_iterations: int = 5000) -> None:
        """Let every plan return until nothing is left to compute."""
        for _ in range(max_iterations):
            if not any(self.plans.values()):
                return
            self.finish_iteration()
        raise AssertionError(f"still running after {max_iterations} iterations")

    # --- what happened

    def reason(self, name: str) -> str:
        (terminal,) = self.terminals[name]
        return terminal.reason

    def expected_output(self, name: str, prompt_len: int, num_tokens: int) -> list[int]:
        return [token_at(name, prompt_len + index) for index in range(num_tokens)]

    def check(self) -> None:
        """What holds after every event."""
        for worker in self.core.workers:
            pool = worker.pool
            placements = {id(r.placement): r.placement for r in worker.running if r.placement is not None}
            for flight in worker.in_flight:
                placements.update({id(placement): placement for placement in flight.placements})
            holders = Counter(block for placement in placements.values() for block in placement.block_table)
            assert sorted([*pool.free_blocks(), *holders]) == list(range(pool.num_blocks)), "free or held, once each"
            assert {block: pool._num_holders[block] for block in holders} == holders
            assert pool.num_reserved == sum(placement.num_reserved for placement in placements.values())
            assert 0 <= pool.num_reserved <= pool.num_free
            if not self.core._limits.has_prefix_cache:
                assert max(holders.values(), default=1) == 1, "each block is held once"
            assert len({placement.slot for placement in placements.values()}) == len(placements)
            self._check_in_flight(worker)

    def _check_in_flight(self, worker: Worker) -> None:
        """A plan for each stage, and those ahead; of each stream only plans of one micro-batch."""
        depth = self.core.limits.depth
        assert len(worker.in_flight) <= depth + worker.num_stages - 1
        streams = [{placement.request.request_id for placement in flight.sampled} for flight in worker.in_flight]
        named = Counter(request_id for sampled in streams for request_id in sampled)
        assert max(named.values(), default=0) <= depth, "in more plans than one micro-batch has"
        for (one, other), (some, more) in zip(combinations(worker.in_flight, 2), combinations(streams, 2), strict=True):
            assert one.micro_batch == other.micro_batch or not some & more, "in two micro-batches at a time"

    def check_drained(self) -> None:
        for worker in self.core.workers:
            assert worker.pool.num_free == worker.pool.num_blocks
            assert not worker.running
        assert self.core.num_open == 0

    def scores(
        self, worker_id: WorkerId, plan: Plan, sampled: list[tuple[Slot, int]]
    ) -> tuple[tuple[SlotScores, ...], tuple[SlotScores, ...]]:
        """What the worker says of sampled and of prompt tokens, besides."""
        return (), ()

    def _report(
        self,
        worker_id: WorkerId,
        plan: Plan,
        sampled: list[tuple[Slot, int]],
        idle_ns: int = 1_000_000,
        took_ns: int = 0,
    ) -> None:
        received_ns = self.worker_clock_ns(worker_id) + idle_ns
        self.now_ns += idle_ns + took_ns
        finished_ns = self.worker_clock_ns(worker_id)
        sampled_scores, prompt_scores = self.scores(worker_id, plan, sampled)
        done = IterationDone(
            epoch=plan.epoch,
            iteration=plan.iteration,
            slots=tuple(slot for slot, _ in sampled),
            token_ids=tuple(token for _, token in sampled),
            received_ns=received_ns,
            started_ns=received_ns,
            finished_ns=finished_ns,
            device_ns=took_ns * self.pipeline_parallel,  # Results of a full pipeline come as often as a stage takes.
            sampled_scores=sampled_scores,
            prompt_scores=prompt_scores,
        )
        self.step(WorkerReported(worker_id=worker_id, report=done))

    def worker_clock_ns(self, worker_id: WorkerId) -> int:
        """The time by a worker's own clock: no two agree."""
        return self.now_ns + CLOCK_OFFSET_NS * int(worker_id.rsplit("-", 1)[1])

    def _forget(self, worker_id: WorkerId) -> None:
        self.devices.pop(worker_id, None)
        self.encoders.pop(worker_id, None)
        self.plans.pop(worker_id, None)

    def _check_gap(self, sampled: TokensSampled, stamps: Stamps, gaps: tuple[WorkerGap, ...]) -> None:
        """What lies between two tokens of a request is accounted for, to the nanosecond."""
        earlier = self.stamps.get(sampled.request_id)
        self.stamps[sampled.request_id] = stamps
        if earlier is None:
            assert sampled.gap == NO_GAP
            return
        gap = gaps[sampled.gap]
        self.gaps.setdefault(sampled.request_id, []).append(gap)
        if stamps.worker_id == earlier.worker_id:
            assert gap.total_ns == stamps.worker_ns - earlier.worker_ns
        else:
            assert gap.total_ns == stamps.scheduler_ns - earlier.scheduler_ns

    def _note(self, batch: StreamBatch) -> None:
        self.queued += [queued.request_id for queued in batch.queued]
        for sampled in batch.sampled:
            assert batch.stamps is not None, "tokens have stamps"
            self._check_gap(sampled, batch.stamps, batch.gaps)
            output = self.output[sampled.request_id]
            assert sampled.request_id not in self.terminals, "no token after the end"
            assert sampled.first_index == len(output), "token indices have no gap and no repeat"
            output.extend(sampled.token_ids)
        for ended in batch.ended:
            assert ended.request_id not in self.stopped, "a stopped request has been told its end by the tokenizer"
            self.terminals.setdefault(ended.request_id, []).append(ended)
