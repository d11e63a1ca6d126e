"""Plans applied to slots: pure bookkeeping, from deltas to the rows of an iteration.

Nothing here waits, computes or knows a device. A row is counted as computed, and its token as sampled, when its plan
is applied, so plans can be applied before the results of earlier ones are there.
"""

from array import array
from dataclasses import dataclass

from common.ids import RequestId, Slot, unpack_ids
from common.messages.plans import NewRequest, Plan, PlanRefused
from common.messages.requests import Sampling

DEFAULT_BLOCK_SIZE = 16
"""Tokens per KV block where neither an option nor the attention back end says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What plans must keep to. The worker says so in its card."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_slots: int
    max_chunk_tokens: int


@dataclass(slots=True, kw_only=True)
class Resident:
    """A request in a slot."""

    slot: Slot
    request_id: RequestId
    num_prompt_tokens: int
    seed: int
    sampling: Sampling
    token_ids: "array[int]"  # those whose values are known; samples join when they are drawn
    block_table: "array[int]"
    num_tokens: int  # known, with those that iterations applied so far will sample
    num_computed: int | None = None  # None until its first row: a prefix may be in the cache already
    num_scored: int = 0  # first prompt tokens whose scores were known when it was introduced


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens [start, start + num_tokens) of one request."""

    resident: Resident
    start: int
    num_tokens: int
    is_sampled: bool

    @property
    def scored(self) -> range:
        """The prompt tokens that this row's logits score: each by those of the token before it."""
        resident = self.resident
        if resident.sampling.prompt_logprobs is None:
            return range(0)
        end = self.start + self.num_tokens + 1
        return range(max(self.start + 1, resident.num_scored), min(end, resident.num_prompt_tokens))

    @property
    def num_logits(self) -> int:
        """Its tokens for which there are logits."""
        return len(self.scored) + self.is_sampled


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one applied plan computes. Rows are in the order in which results are reported."""

    epoch: int
    iteration: int
    rows: tuple[Row, ...]


class _Refusal(Exception):
    """A plan cannot be applied; the message is PlanRefused.detail."""


class PlanState:
    """The slots and decode set of one connection to a scheduler."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._epoch: int | None = None
        self._next_iteration = 0
        self._has_refused = False  # in the current epoch
        self._residents: dict[Slot, Resident] = {}
        self._decoding: dict[Slot, Resident] = {}  # in the order in which they were added

    @property
    def num_slots_in_use(self) -> int:
        return len(self._residents)

    def apply(self, plan: Plan) -> Iteration | PlanRefused | None:
        """Return the plan's iteration, or why there is none. None: it is of an epoch that is over, or refused."""
        if self._epoch is None or plan.epoch > self._epoch:
            self._begin(plan.epoch)
        elif plan.epoch < self._epoch or self._has_refused:
            return None
        try:
            rows = self._apply(plan)
        except _Refusal as refusal:
            self._has_refused = True
            self._residents.clear()
            self._decoding.clear()
            return PlanRefused(epoch=plan.epoch, iteration=plan.iteration, detail=str(refusal))
        self._next_iteration += 1
        return Iteration(plan.epoch, plan.iteration, rows)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._next_iteration = 0
        self._has_refused = False
        self._residents.clear()
        self._decoding.clear()

    def _apply(self, plan: Plan) -> tuple[Row, ...]:
        _check(
            plan.iteration == self._next_iteration,
            f"iteration {plan.iteration} came where {self._next_iteration} was due",
        )
        for slot in plan.released:
            self._resident(slot, "released")
            del self._residents[slot]
            self._decoding.pop(slot, None)
        for request in plan.introduced:
            self._introduce(request)
        for grown in plan.grown:
            resident = self._resident(grown.slot, "grown")
            self._check_blocks(grown.slot, array("i", grown.block_ids))
            resident.block_table.extend(grown.block_ids)
        for slot in plan.decode_removed:
            _check(slot in self._decoding, f"slot {slot} is removed from the decode set, where it is not")
            del self._decoding[slot]
        for slot in plan.decode_added:
            _check(slot not in self._decoding, f"slot {slot} is added to the decode set, where it is already")
            self._decoding[slot] = self._resident(slot, "added to the decode set")
        return self._rows(plan)

    def _introduce(self, request: NewRequest) -> None:
        slot, limits = request.slot, self._limits
        _check(0 <= slot < limits.max_num_slots, f"slot {slot} is not below {limits.max_num_slots}")
        _check(slot not in self._residents, f"slot {slot} is introduced while it is in use")
        try:
            token_ids, block_table = unpack_ids(request.token_ids), unpack_ids(request.block_table)
        except ValueError as error:
            raise _Refusal(f"slot {slot}: {error}") from error
        num_tokens = len(token_ids)
        _check(
            1 <= request.num_prompt_tokens <= num_tokens <= limits.max_model_len,
            f"slot {slot} has {num_tokens} tokens, {request.num_prompt_tokens} of them prompt; "
            f"this model takes 1 to {limits.max_model_len}",
        )
        _check(
            min(token_ids) >= 0 and max(token_ids) < limits.vocab_size,
            f"slot {slot} has a token id outside the vocabulary of {limits.vocab_size}",
        )
        self._check_blocks(slot, block_table)
        self._residents[slot] = Resident(
            slot=slot,
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            seed=request.seed,
            sampling=request.sampling,
            token_ids=token_ids,
            block_table=block_table,
            num_tokens=num_tokens,
            num_scored=request.num_scored,
        )

    def _rows(self, plan: Plan) -> tuple[Row, ...]:
        num_rows = len(self._decoding) + len(plan.chunks)
        num_tokens = len(self._decoding) + sum(chunk.num_tokens for chunk in plan.chunks)
        most = self._limits.max_chunk_tokens
        _check(num_tokens <= most, f"the iteration has {num_tokens} tokens; this worker computes at most {most}")
        rows = []
        for resident in self._decoding.values():
            rows.append(self._take(resident, resident.num_tokens - 1, num_tokens=1, is_sampled=True))
        for chunk in plan.chunks:
            resident = self._resident(chunk.slot, "given a chunk")
            rows.append(self._take(resident, chunk.start, chunk.num_tokens, chunk.is_sampled))
        # Rows of one iteration are computed side by side: a second one of a request could not see the first's sample.
        _check(len({row.resident.slot for row in rows}) == num_rows, "a slot has two rows in one iteration")
        return tuple(rows)

    def _take(self, resident: Resident, start: int, num_tokens: int, is_sampled: bool) -> Row:
        """Check one row, and count it as done."""
        slot, end = resident.slot, start + num_tokens
        _check(
            num_tokens >= 1 and start >= 0 and end <= resident.num_tokens,
            f"slot {slot}: tokens [{start}, {end}) are not among the {resident.num_tokens} known",
        )
        _check(end <= self._limits.max_model_len, f"slot {slot}: position {end - 1} is beyond the context")
        _check(
            resident.num_computed is None or start == resident.num_computed,
            f"slot {slot}: tokens [{start}, {end}) do not follow the {resident.num_computed} computed",
        )
        capacity = len(resident.block_table) * self._limits.block_size
        _check(end <= capacity, f"slot {slot}: its blocks hold {capacity} tokens, [{start}, {end}) end past them")
        _check(
            end == resident.num_tokens or not is_sampled,
            f"slot {slot}: sampled after token {end - 1}, while {resident.num_tokens} are known",
        )
        resident.num_computed = end
        resident.num_tokens += is_sampled
        return Row(resident, start, num_tokens, is_sampled)

    def _resident(self, slot: Slot, what: str) -> Resident:
        resident = self._residents.get(slot)
        if resident is None:
            raise _Refusal(f"slot {slot} is {what}, but not in use")
        return resident

    def _check_blocks(self, slot: Slot, block_ids: "array[int]") -> None:
        num_blocks = self._limits.num_blocks
        is_in_pool = not block_ids or (min(block_ids) >= 0 and max(block_ids) < num_blocks)
        _check(is_in_pool, f"slot {slot} has a block outside the pool of {num_blocks}")


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise _Refusal(problem)
