"""Builds one iteration of one worker: who runs, with how many tokens, in which blocks."""

from bisect import insort
from collections.abc import Collection, Iterator
from math import inf

from common.cost.load import Load
from common.ids import BlockId, WorkerId
from common.messages.plans import GrownTable, NewRequest
from services.scheduler.deadlines import choose_decodes
from services.scheduler.events import Bound, Chunk, Decode, RunIteration
from services.scheduler.giving_way import GivingWay
from services.scheduler.kv.blocks import BlockPool
from services.scheduler.limits import Limits
from services.scheduler.micro_batches import deal, even_out
from services.scheduler.placement import Placer
from services.scheduler.policy import POLICIES
from services.scheduler.policy.batch import Batch, Candidate, Room, Running
from services.scheduler.request import Placement, Request
from services.scheduler.waiting import WaitingQueue
from services.scheduler.worker import InFlight, Worker

LEAST_TURN = 4.0
"""Times of the shortest possible iteration that one without streams may take, even beyond the target. On a device that
is slow for its target, shorter ones would spend themselves on reading the weights."""

MAX_SCORED_TOKENS = 256
"""Of one prompt in one iteration. A scored token with five alternatives takes tokenizer and gateway 45 us together, in
which their event loops serve no stream: 12 ms for so many, where a chunk of 2,048 would take 90."""


class Planner:
    """Turns the state of the pool into plans. Owned by the core, whose queue and workers it shares."""

    def __init__(self, limits: Limits, waiting: WaitingQueue, workers: dict[WorkerId, Worker]) -> None:
        self._limits = limits
        self._waiting = waiting
        self._workers = workers
        self._policy = POLICIES[limits.policy]
        self.placer = Placer(limits, reserves_max_len=self._policy.reserves_max_len)
        self.giving_way = GivingWay(waiting, self.placer)

    @property
    def num_places(self) -> int:
        """Waiting prompts that are looked at together, of which the shorter ones are read first."""
        running = (request.placed for worker in self._workers.values() for request in worker.running)
        num_being_read = sum(not placement.is_decoding for placement in running)
        return self._policy.num_shared * len(self._workers) - num_being_read

    def counted_on(self, now_ns: int) -> Collection[Worker]:
        """The workers that those who wait may begin on: all but silent ones, which may be lost; all if all are."""
        workers = self._workers.values()
        return [worker for worker in workers if worker.silent_from_ns > now_ns] or workers

    def plan(self, worker: Worker, now_ns: int) -> RunIteration | None:
        """Take what the worker's next iteration needs, and return it; None if there is nothing to compute."""
        self.giving_way.make_room(worker)
        self.giving_way.make_way_for_urgent(worker, self.counted_on(now_ns))
        for micro_batch in worker.turns(self._limits.depth):
            if (plan := self._plan(worker, micro_batch, now_ns)) is not None:
                return plan
        return None

    def _plan(self, worker: Worker, micro_batch: int, now_ns: int) -> RunIteration | None:
        """Plan the micro-batch's next iteration. A worker that is no pipeline has one micro-batch."""
        start_ns = worker.start_ns(micro_batch, now_ns)
        running = self._running(worker, start_ns)
        if not running.decoding and not running.prefilling and not self._waiting:
            return None
        if worker.num_stages > 1:
            even_out(
                worker,
                micro_batch,
                running.decoding,
                start_ns=start_ns,
                now_ns=now_ns,
                allowance_ns=self._limits.ring_allowance_ns,
            )
        room, decoding, denied = self._room(worker, micro_batch, start_ns, running.decoding)
        batch = Batch(worker.predict_ns, room)
        self._policy.fill(
            batch, Running(decoding=decoding, prefilling=running.prefilling), self._admissible(worker, now_ns)
        )
        if not batch.decodes and not batch.chunks:
            return None
        return self._commit(worker, micro_batch, batch, denied + _parked(worker), now_ns, start_ns)

    # --- how much

    def room(self, worker: Worker, now_ns: int) -> tuple[Room, list[Placement]]:
        """How much the worker's next iteration may hold, and the streams that it would carry. Takes nothing."""
        micro_batch = worker.next_micro_batch
        start_ns = worker.start_ns(micro_batch, now_ns)
        room, decoding, _ = self._room(worker, micro_batch, start_ns, self._running(worker, start_ns).decoding)
        return room, decoding

    def _room(
        self, worker: Worker, micro_batch: int, start_ns: int, decoding: list[Placement]
    ) -> tuple[Room, list[Placement], list[Placement]]:
        """How much the iteration may hold, which streams it carries, and for which there is no block."""
        limits = self._limits
        others: list[Placement] = []
        if worker.num_stages > 1:
            dealt = deal(decoding, micro_batch, worker.num_stages, worker.ahead_ns(start_ns))
            decoding, others = dealt.own, dealt.others
        decoding, denied = _with_blocks(worker.pool, decoding)
        for placement in denied:
            placement.slack_ns //= 2  # Its token comes from a later plan, which is to have as much time as this one.
        allowed_ns: float | None = None
        time_bound = Bound.DEADLINE
        max_tokens = worker.card.max_chunk_tokens
        if limits.fixed_token_budget is not None:
            max_tokens = min(max_tokens, limits.fixed_token_budget)
        else:
            decodes = choose_decodes(
                decoding,
                worker.predict_ns,
                margin_ns=worker.margin.ns,
                allowance_ns=limits.ring_allowance_ns,
                lost_ns=limits.tbt_target_ns,
                others=others + denied,
            )
            decoding, allowed_ns = decodes.placements, decodes.allowed_ns
            if allowed_ns is None:
                allowed_ns, time_bound = self._turn_ns(worker), Bound.TURN
        room = Room(
            max_tokens=max_tokens,
            max_batched_tokens=limits.max_batched_tokens,
            max_chunk_tokens=worker.card.max_chunk_tokens,
            min_prefill_tokens=limits.min_prefill_tokens,
            tile_tokens=worker.roofline.device.tile_tokens,
            allowed_ns=allowed_ns,
            time_bound=time_bound,
            follows_prefill=worker.last_was_prefill[micro_batch],
        )
        return room, decoding, denied

    def _turn_ns(self, worker: Worker) -> float:
        """How long an iteration may take that carries no stream: a newcomer waits for its end."""
        least = Load()
        least.add_chunk(0, 1, is_sampled=False)
        return max(self._limits.tbt_target_ns, LEAST_TURN * worker.predict_ns(least))

    # --- who

    def _running(self, worker: Worker, start_ns: int) -> Running:
        """All that could run, but for prompts whose next token finds no block."""
        pool = worker.pool
        decoding: list[Placement] = []
        prefilling: list[Candidate] = []
        for request in worker.running:
            placement = request.placement
            assert placement is not None, "a running request has a placement"
            start = placement.num_planned
            if placement.is_parked:
                continue
            if start < placement.prefill_len:
                if placement.needs_block and not pool.num_available:
                    continue
                num_tokens = min(placement.prefill_len - start, _most_of(request))
                prefilling.append(Candidate(request, placement, start, num_tokens))
            elif start < request.max_len - 1:  # Its last token is never computed.
                last = placement.last_flight
                placement.slack_ns = request.tbt_target_ns + (0 if last is None else last.end_ns - start_ns)
                decoding.append(placement)
        return Running(decoding=decoding, prefilling=prefilling)

    def _admissible(self, worker: Worker, now_ns: int) -> Iterator[Candidate]:
        """Waiting requests that this worker should begin."""
        for request, fit in self.placer.to_begin(worker, self.counted_on(now_ns), self._waiting):
            num_tokens = len(request.token_ids) - fit.num_cached_tokens
            yield Candidate(request, None, fit.num_cached_tokens, min(num_tokens, _most_of(request)))

    # --- taking it

    def _commit(
        self,
        worker: Worker,
        micro_batch: int,
        batch: Batch,
        denied: list[Placement],
        now_ns: int,
        start_ns: int,
    ) -> RunIteration:
        """Take slots and blocks for the batch, for prompts as far as there are any, and make it a plan."""
        introduced: list[NewRequest] = []
        # Newcomers first: of the blocks that they were found to share, none may be taken for others meanwhile.
        placed = [
            candidate.placement or self._place(candidate.request, worker, now_ns) for candidate, _ in batch.chunks
        ]
        decodes = batch.decodes
        grown = _take_decodes(decodes)
        chunks: list[Chunk] = []
        placements: list[Placement] = []
        sampled = decodes.copy()
        for (candidate, num_tokens), placement in zip(batch.chunks, placed, strict=True):
            chunk, new_blocks = self._take_chunk(placement, num_tokens)
            if chunk is None or (chunk.start, chunk.num_tokens) != (candidate.start, num_tokens):
                _correct(batch.load, candidate, num_tokens, chunk)
            if chunk is None:
                continue
            if not placement.is_introduced:
                placement.is_introduced = True
                introduced.append(candidate.request.new_request(placement))
            elif new_blocks:
                grown.append(GrownTable(placement.slot, new_blocks))
            chunks.append(chunk)
            placements.append(placement)
            if chunk.is_sampled:
                placement.micro_batch = micro_batch
                sampled.append(placement)
        assert decodes or chunks, "the first of those that could run has its block"
        terms = worker.roofline.terms(batch.load)
        predicted_ns = int(worker.fit.predict_ns(terms))
        decode_ns = predicted_ns
        if chunks:
            decode_ns = min(decode_ns, int(worker.predict_ns(batch.load.decodes_alone()))) if decodes else 0
        allowed_ns = batch.room.allowed_ns
        plan = RunIteration(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            iteration=worker.next_iteration,
            decodes=tuple([placement.decode for placement in decodes]),
            chunks=tuple(chunks),
            introduced=tuple(introduced),
            grown=tuple(grown),
            released=tuple(worker.released),
            predicted_ns=predicted_ns,
            allowed_ns=None if allowed_ns is None else int(allowed_ns),
            bound=batch.bound,
            kept=tuple(worker.kept),
        )
        flight = InFlight(
            plan=plan,
            decodes=decodes,
            chunks=placements,
            denied=denied,
            sampled=sampled,
            terms=terms,
            decode_ns=decode_ns,
            num_prefill_tokens=batch.load.prefill_tokens,
            micro_batch=micro_batch,
            sent_ns=now_ns,
            timeout_ns=start_ns + self._limits.plan_timeout_ns,
        )
        for placement in sampled:
            placement.last_flight = flight
        worker.launch(flight, start_ns)
        return plan

    def _place(self, request: Request, worker: Worker, now_ns: int) -> Placement:
        self._waiting.take(request)
        self._waiting.note_start(now_ns)
        insort(worker.running, request, key=_rank)
        slot = worker.take_slot()
        stop_ids = request.stop_ids if request.arrived.sampling.ignore_eos else request.stop_ids | worker.eos_ids
        decode = Decode(request.request_id, slot)
        placement = Placement(worker, request, slot, len(request.token_ids), decode, stop_ids)
        pool = worker.pool
        if self._limits.has_prefix_cache:
            hashes = request.prefix_hashes(pool.block_size)
            placement.block_table = pool.share(hashes[: pool.match(hashes).num_blocks])
            placement.num_published = len(placement.block_table)
            placement.room = placement.num_published * pool.block_size
            placement.num_computed = placement.num_planned = placement.room
            placement.publish_len = placement.room + pool.block_size
        else:
            placement.publish_len = inf
        if self._policy.reserves_max_len or request.num_preemptions >= self._limits.max_preemptions:
            placement.is_pinned = True
            placement.num_reserved = pool.blocks_for(request.max_len - 1) - len(placement.block_table)
            pool.num_reserved += placement.num_reserved
        if request.first_planned_ns is None:
            request.first_planned_ns = now_ns
            request.num_cached_tokens = min(placement.num_computed, request.arrived.num_prompt_tokens)
        request.placement = placement
        return placement

    def _take_chunk(self, placement: Placement, num_tokens: int) -> tuple[Chunk | None, tuple[BlockId, ...]]:
        """Take what the chunk needs: all of it, or of a smaller chunk where blocks are short, or nothing."""
        start = placement.num_planned
        new_blocks: tuple[BlockId, ...] = ()
        if start + num_tokens > placement.room:
            num_tokens, new_blocks = _grow_table(placement, num_tokens)
            if num_tokens <= 0:
                return None, ()
        is_sampled = start + num_tokens == placement.prefill_len
        placement.num_planned = start + num_tokens
        placement.num_in_flight += 1
        return Chunk(placement.request.request_id, placement.slot, start, num_tokens, is_sampled), new_blocks


def _with_blocks(pool: BlockPool, decoding: list[Placement]) -> tuple[list[Placement], list[Placement]]:
    """The streams whose next token has a block or can take one, by rank, and the others."""
    num_available = pool.num_available
    if len(decoding) <= num_available:
        return decoding, []
    able: list[Placement] = []
    denied: list[Placement] = []
    for placement in decoding:
        if placement.needs_block:
            if not num_available:
                denied.append(placement)
                continue
            num_available -= 1
        able.append(placement)
    return able, denied


def _parked(worker: Worker) -> list[Placement]:
    """The streams that stay out of an iteration because another is to have their blocks."""
    if not worker.has_parked:
        return []
    return [it for request in worker.running if (it := request.placed).is_parked and it.is_decoding]


def _take_decodes(decodes: list[Placement]) -> list[GrownTable]:
    """Take a block for each stream whose next token needs one."""
    grown: list[GrownTable] = []
    for placement in decodes:
        start = placement.num_planned
        if start >= placement.room:
            num_tokens, new_blocks = _grow_table(placement, 1)
            assert num_tokens == 1, "streams without a block are left out"
            grown.append(GrownTable(placement.slot, new_blocks))
        placement.num_planned = start + 1
        placement.num_in_flight += 1
    return grown


def _most_of(request: Request) -> int:
    """How much of its prompt one iteration may read."""
    return MAX_SCORED_TOKENS if request.is_scoring else request.max_len


def _grow_table(placement: Placement, num_tokens: int) -> tuple[int, tuple[BlockId, ...]]:
    """Take blocks for the next num_tokens, or for as many as there are blocks for; how many tokens, and the blocks."""
    pool = placement.worker.pool
    table = placement.block_table
    num_needed = pool.blocks_for(placement.num_planned + num_tokens) - len(table)
    num_available = pool.num_available + placement.num_reserved
    if num_needed > num_available:
        num_needed = max(0, num_available)
        num_tokens = (len(table) + num_needed) * pool.block_size - placement.num_planned
    new_blocks = pool.take(num_needed)
    table.extend(new_blocks)
    placement.room = len(table) * pool.block_size
    num_of_reserve = min(num_needed, placement.num_reserved)
    placement.num_reserved -= num_of_reserve
    pool.num_reserved -= num_of_reserve
    return num_tokens, new_blocks


def _correct(load: Load, candidate: Candidate, num_tokens: int, chunk: Chunk | None) -> None:
    """Blocks were short for what the policy took, or a prefix was gone; make the load what is really computed."""
    candidate.remove_from(load, num_tokens)
    if chunk is not None:
        num_scored = candidate.request.num_scored_in(chunk.start, chunk.num_tokens)
        load.add_chunk(chunk.start, chunk.num_tokens, is_sampled=chunk.is_sampled, num_scored=num_scored)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
