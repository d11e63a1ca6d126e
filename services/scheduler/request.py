"""One request as the scheduler sees it: what is known, what is computed, what is in flight."""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.ids import BlockId, RequestId, Slot, pack_ids, unpack_ids
from common.messages.plans import NewRequest
from common.messages.streams import RequestArrived
from services.scheduler.events import Decode
from services.scheduler.kv.prefix import PrefixHashes

if TYPE_CHECKING:
    from services.scheduler.account import Interruption, Tally
    from services.scheduler.worker import InFlight, Worker


@dataclass(slots=True, eq=False)
class Placement:
    """A request's stay on one worker, from its first chunk there until its blocks are released.

    Tokens [0, num_computed) have their KV in the cache; those up to num_planned will, once the plans in flight return.
    """

    worker: "Worker"
    request: "Request"
    slot: Slot
    prefill_len: int  # tokens known when it began: all are computed before the first sample
    decode: Decode  # it, in a plan
    stop_ids: frozenset[int]  # any of them ends it: its own, and the model's unless it ignores those
    block_table: list[BlockId] = field(default_factory=list)
    room: int = 0  # tokens that its block table holds
    num_computed: int = 0
    num_planned: int = 0
    num_published: int = 0  # blocks whose hash is published, or was when they were shared
    publish_len: float = 0  # tokens computed with which the next block is published; infinite without a prefix cache
    num_in_flight: int = 0  # plans in flight that name the request
    num_reserved: int = 0  # blocks of the pool's reserve that are its own
    is_pinned: bool = False  # all its blocks are taken or reserved, and it is never preempted
    micro_batch: int = 0  # of those that take turns in a pipeline, the one in which it decodes
    slack_ns: int = 0  # of a decode that may run: from the iteration's start to its next token's deadline
    last_flight: "InFlight | None" = None  # the latest plan that brings or brought it a token
    tally: "Tally | None" = None  # of the result that brought its last token
    denied_decode_ns: int = 0  # since then, of iterations that it sat out for want of a block: what their decodes
    denied_prefill_ns: int = 0  # and what their prompts were predicted to take
    is_introduced: bool = False  # the worker knows it, in the current epoch
    is_parked: bool = False  # in no further plan, so that it can be preempted once none is in flight

    @property
    def has_more(self) -> bool:
        """Whether a further chunk can be planned. A prompt's tokens are known, and a decode's input is, or a plan in
        flight samples it; the last token of all is never computed."""
        return self.num_planned < self.request.max_len - 1

    @property
    def is_decoding(self) -> bool:
        return self.num_planned >= self.prefill_len

    @property
    def needs_block(self) -> bool:
        """Whether its next token needs a block that is neither in its table nor reserved for it."""
        return self.num_planned >= self.room and not self.num_reserved


LEAST_TWIN_TOKENS = 128
"""Of a prompt that one request reads while others with the same one wait to find it in the cache."""


@dataclass(slots=True, eq=False)
class Request:
    """One request from its arrival until its end has been told and its blocks are free."""

    arrived: RequestArrived
    order: int  # of arrival; ties are broken by it
    arrived_ns: int
    queue_deadline_ns: int
    tbt_target_ns: int
    token_ids: "array[int]"  # prompt, then output
    max_len: int  # tokens of prompt and output together, at most
    stop_ids: frozenset[int]  # its own
    hashes: PrefixHashes
    placement: Placement | None = None
    first_planned_ns: int | None = None
    num_cached_tokens: int = 0  # found in the prefix cache when it first began
    num_overtaken: int = 0  # requests that came, or come, after it and began before it
    num_preemptions: int = 0
    num_losses: int = 0  # workers lost under it
    interruption: "Interruption | None" = None  # it streamed, lost its place, and has had no token since
    num_scored: int = 1  # first prompt tokens whose scores have been told, or need none: nothing precedes the first
    has_ended: bool = False  # nothing more is told of it; it may still be in flight

    @classmethod
    def of(
        cls,
        arrived: RequestArrived,
        *,
        order: int,
        now_ns: int,
        queue_deadline_ns: int,
        tbt_target_ns: int,
    ) -> "Request":
        return cls(
            arrived=arrived,
            order=order,
            arrived_ns=now_ns,
            queue_deadline_ns=queue_deadline_ns,
            tbt_target_ns=tbt_target_ns,
            token_ids=unpack_ids(arrived.token_ids),
            max_len=arrived.num_prompt_tokens + arrived.max_tokens,
            stop_ids=frozenset(arrived.sampling.stop_token_ids),
            hashes=PrefixHashes(arrived.cache_salt),
        )

    @property
    def request_id(self) -> RequestId:
        return self.arrived.request_id

    @property
    def placed(self) -> Placement:
        """Its placement; it is running."""
        assert self.placement is not None, "a running request has a placement"
        return self.placement

    @property
    def rank(self) -> tuple[int, int]:
        """Lower runs earlier, is preempted later."""
        return self.arrived.priority, self.order

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.arrived.num_prompt_tokens

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens are still to be scored."""
        return self.arrived.sampling.prompt_logprobs is not None and self.num_scored < self.arrived.num_prompt_tokens

    @property
    def twin_key(self) -> tuple[bytes, str] | None:
        """Equal for requests that find each other's prompt in a cache; None where that is not worth waiting for."""
        arrived = self.arrived
        if arrived.num_prompt_tokens < LEAST_TWIN_TOKENS or self.is_scoring:
            return None
        return arrived.token_ids, arrived.cache_salt

    def num_scored_in(self, start: int, num_tokens: int) -> int:
        """How many prompt tokens are scored by computing num_tokens from start on: each by the one before it."""
        if not self.is_scoring:
            return 0
        first, end = max(start + 1, self.num_scored), min(start + num_tokens + 1, self.arrived.num_prompt_tokens)
        return max(0, end - first)

    def prefix_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of the full blocks that may be taken from a cache: all but its last known token, whose logits are
        needed; and none while logits of the whole prompt are."""
        if self.is_scoring:
            return []
        num_blocks = (len(self.token_ids) - 1) // block_size
        return self.hashes.first(num_blocks, self.token_ids, block_size)[:num_blocks]

    def new_request(self, placement: Placement) -> NewRequest:
        """What the worker must be told of it now."""
        return NewRequest(
            slot=placement.slot,
            request_id=self.request_id,
            token_ids=pack_ids(self.token_ids),
            num_prompt_tokens=self.arrived.num_prompt_tokens,
            seed=self.arrived.seed,
            sampling=self.arrived.sampling,
            block_table=pack_ids(placement.block_table),
            traceparent=self.arrived.traceparent,
            num_scored=0 if self.arrived.sampling.prompt_logprobs is None else self.num_scored,
        )
