"""What goes into the scheduler core and what comes out.

Wire messages are events as they are: RequestArrived, StopReached, Cancel. Those of a worker carry no sender, so the
shell wraps them. Effects are values: the shell carries them out in order.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from common.cost.fit import SavedFit
from common.ids import RequestId, Slot, TokenizerId, WorkerId
from common.messages.cards import PoolCard, WorkerCard
from common.messages.plans import GrownTable, IterationDone, KeptIteration, NewRequest, PlanRefused
from common.messages.requests import Cancel
from common.messages.streams import RequestArrived, StopReached, StreamBatch


class Bound(StrEnum):
    """What kept an iteration from computing more."""

    NOTHING = "nothing"  # all that could run does
    DEADLINE = "deadline"  # of a running stream: its target, less the margin
    TURN = "turn"  # nobody streams; the iteration ends within a target's time so that a newcomer need not wait longer
    TOKENS = "tokens"  # a token budget that the operator set, or the most that the worker takes
    FLOOR = "floor"  # a deadline left nothing for prefill, which then got its floor: the target will be missed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker connected; it holds nothing."""

    worker_id: WorkerId
    card: WorkerCard
    fit: SavedFit | None = None  # what an earlier worker of the same device, model and layout has taught


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker is gone, with all that it held."""

    worker_id: WorkerId
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReported:
    """A worker answered a plan."""

    worker_id: WorkerId
    report: IterationDone | PlanRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerLost:
    """A tokenizer is gone; nobody waits for its requests' tokens any more."""

    tokenizer_id: TokenizerId


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time that a WakeAt asked for has come."""


Event = RequestArrived | StopReached | Cancel | WorkerJoined | WorkerLost | WorkerReported | TokenizerLost | TimerFired


class Decode(NamedTuple):
    """The next token of a running stream: its input is the worker's own last sample, or about to be. One value serves
    a whole stay on a worker, so that planning a steady batch creates nothing."""

    request_id: RequestId
    slot: Slot


class Chunk(NamedTuple):
    """Prefill: tokens [start, start + num_tokens) of one request."""

    request_id: RequestId
    slot: Slot
    start: int
    num_tokens: int
    is_sampled: bool  # it ends where the known tokens end, so the next token is drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIteration:
    """One hybrid batch for one worker."""

    worker_id: WorkerId
    epoch: int
    iteration: int
    decodes: tuple[Decode, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    introduced: tuple[NewRequest, ...] = ()  # requests of chunks that the worker does not know yet
    grown: tuple[GrownTable, ...] = ()  # blocks for what it computes, of requests that the worker does know
    released: tuple[Slot, ...] = ()  # slots that the worker may forget, before introduced takes them again
    predicted_ns: int  # how long it will take
    allowed_ns: int | None  # how long it might, margin and allowance taken off; None where tokens are counted instead
    bound: Bound
    kept: tuple[KeptIteration, ...] = ()  # iterations of this worker that made sampled streams late

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes."""
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStreams:
    """All that one tokenizer must be told after this event."""

    tokenizer_id: TokenizerId
    batch: StreamBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChanged:
    """Every tokenizer must be told what the pool is now."""

    card: PoolCard


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissWorker:
    """A worker does not keep the contract; its link must be dropped. The core has forgotten it already."""

    worker_id: WorkerId
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPreempted:
    """A request's blocks were taken for another's sake; for logs and metrics."""

    request_id: RequestId
    for_request_id: RequestId  # the one that needed room
    worker_id: WorkerId
    num_tokens: int  # whose KV must be computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request has left the scheduler, however it ended; for logs and metrics."""

    request_id: RequestId
    reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queue_ns: int  # from its arrival to its first chunk, or to its end if there was none


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """A TimerFired is due at due_ns, unless one comes earlier."""

    due_ns: int


Effect = RunIteration | SendStreams | PoolChanged | DismissWorker | RequestPreempted | RequestFinished | WakeAt
