"""Between scheduler and worker: what each iteration computes, and what came of it."""

from common.ids import BlockId, RequestId, Slot
from common.messages.base import Message, Row
from common.messages.logprobs import TokenScores
from common.messages.requests import Sampling


class NewRequest(Row, frozen=True):
    """All that a worker must know of a request; later plans name only its slot."""

    slot: Slot
    request_id: RequestId  # for logs and traces
    token_ids: bytes  # pack_ids of all known tokens
    num_prompt_tokens: int  # how many are prompt, for min_tokens and penalties
    seed: int
    sampling: Sampling
    block_table: bytes  # pack_ids of its KV blocks in position order; grows with Plan.grown
    traceparent: str = ""
    num_scored: int = 0  # first prompt tokens whose scores are known: Sampling.prompt_logprobs asks for the others


class PlanChunk(Row, frozen=True):
    """Tokens [start, start + num_tokens) of the request in slot. Their KV goes where its block table says."""

    slot: Slot
    start: int
    num_tokens: int
    is_sampled: bool  # draw the next token from the last position's logits; else there are no logits


class GrownTable(Row, frozen=True):
    """Blocks to append to the block table of the request in slot."""

    slot: Slot
    block_ids: tuple[BlockId, ...]


class KeptIteration(Row, frozen=True):
    """An iteration that took part in a stall: its span is to be written, below that of the request that stalled."""

    epoch: int
    iteration: int
    traceparent: str


class Plan(Message, frozen=True, kw_only=True):
    """One iteration of one worker. Scheduler to worker; answered by one IterationDone, or by one PlanRefused an epoch.

    A worker keeps, per slot, the request, the number of tokens computed, and all tokens known (NewRequest's and its
    own samples); and, in order, the set of slots that decode. Fields apply in the order in which they stand here.
    After decode_removed and decode_added, the iteration's rows are: for each decoding slot, in the order in which
    they were added, its next token (sampled); then the chunks. So a steady decode batch is an empty plan.

    Plans of an epoch are numbered from 0 without a gap. A new epoch starts from nothing: no slot, no decode set; the
    KV cache's contents stay.
    """

    epoch: int
    iteration: int
    released: tuple[
        Slot, ...
    ] = ()  # slots to forget, never in use by a plan in flight; removed from the decode set too
    introduced: tuple[NewRequest, ...] = ()
    grown: tuple[GrownTable, ...] = ()
    decode_removed: tuple[Slot, ...] = ()
    decode_added: tuple[Slot, ...] = ()
    chunks: tuple[PlanChunk, ...] = ()
    kept: tuple[KeptIteration, ...] = ()  # earlier iterations, for traces; means nothing to the computation


class SlotScores(Row, frozen=True):
    """Log-probabilities of some tokens of the request in slot."""

    slot: Slot
    first_index: int  # index of the first one in prompt and output together
    scores: TokenScores


class IterationDone(Message, frozen=True, kw_only=True):
    """A worker finished an iteration. slots and token_ids are parallel: one sampled token for each sampled row, in
    the order of the rows. Times are the worker's monotonic clock."""

    epoch: int
    iteration: int
    slots: tuple[Slot, ...]
    token_ids: tuple[int, ...]
    received_ns: int  # the plan arrived
    started_ns: int
    finished_ns: int
    device_ns: int  # device time, without queueing; of pipeline stages the sum
    bubble_ns: int = 0  # time that pipeline stages waited for each other, the sum over stages
    sampled_scores: tuple[SlotScores, ...] = ()  # of sampled tokens, where Sampling.logprobs asks for them
    prompt_scores: tuple[SlotScores, ...] = ()  # of prompt tokens, where Sampling.prompt_logprobs asks for them


class PlanRefused(Message, frozen=True, kw_only=True):
    """The worker could not apply a plan (a gap in the sequence, an unknown slot). It ignores the rest of the epoch;
    the scheduler opens a new one with full state."""

    epoch: int
    iteration: int
    detail: str
