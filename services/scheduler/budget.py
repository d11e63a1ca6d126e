"""The token budget of a worker's next iteration, and what set it: for people and gauges, not for planning.

The planner needs no such number: it asks for each prompt how large a chunk fits beside the batch built so far. The
number here is the answer for one prompt without context, which is what others call max_num_batched_tokens.
"""

from collections.abc import Sequence

import msgspec

from common.cost.load import Load
from common.cost.roofline import TERM_NAMES
from common.ids import RequestId, WorkerId
from services.scheduler.events import Bound
from services.scheduler.limits import Limits
from services.scheduler.policy.batch import Room, largest_that
from services.scheduler.request import Placement
from services.scheduler.worker import Worker


class Deadline(msgspec.Struct, frozen=True, kw_only=True):
    """The running stream that leaves the next iteration the least time."""

    request_id: RequestId
    target_ms: float
    slack_ms: float  # from the iteration's start until the stream's next token is due


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What the next iteration may hold. Times are predictions of the worker's corrected cost model."""

    worker_id: WorkerId
    token_budget: int  # tokens that the iteration may compute, decodes included
    num_decodes: int
    max_prefill_tokens: int  # that one new prompt would get of it
    bound: Bound  # what keeps it from being larger
    allowed_ms: float | None  # how long the iteration may take; None where tokens are counted instead
    margin_ms: float  # learned: of the time, what is kept free for jitter, as far as decodes leave twice as much
    allowance_ms: float  # for the rest of the ring
    decodes_ms: float  # how long the decodes alone would take
    filled_ms: float  # how long the full budget would take
    terms_ms: dict[str, float]  # of filled_ms, by term of the cost model
    binding_term: str  # the one that another token of prefill makes grow most
    tightest: Deadline | None  # None where nobody streams


def budget_of(worker: Worker, room: Room, decoding: Sequence[Placement], limits: Limits) -> Budget:
    """Return the budget of an iteration with this room, which carries these streams."""
    load = Load()
    load.add_decodes(len(decoding), sum(placement.num_planned for placement in decoding))
    decodes_ns = worker.predict_ns(load) if decoding else 0.0
    most = max(0, room.max_tokens - load.num_tokens)
    num_prefill, bound = most, Bound.TOKENS
    allowed_ns = room.allowed_ns
    if allowed_ns is not None and _filled_ns(worker, load, most) > allowed_ns:
        num_prefill = largest_that(lambda num_tokens: _filled_ns(worker, load, num_tokens) <= allowed_ns, most)
        bound = room.time_bound
        if num_prefill == 0:
            num_prefill, bound = min(most, room.min_prefill_tokens), Bound.FLOOR
    filled = _with_prefill(load, num_prefill)
    terms_ns = _corrected(worker, filled)
    growth_ns = [
        more - now for more, now in zip(_corrected(worker, _with_prefill(load, num_prefill + 1)), terms_ns, strict=True)
    ]
    tightest = min(decoding, key=lambda placement: (placement.slack_ns, placement.request.order), default=None)
    return Budget(
        worker_id=worker.worker_id,
        token_budget=load.num_tokens + num_prefill,
        num_decodes=len(decoding),
        max_prefill_tokens=num_prefill,
        bound=bound,
        allowed_ms=None if allowed_ns is None else _ms(allowed_ns),
        margin_ms=_ms(worker.margin.ns),
        allowance_ms=_ms(limits.ring_allowance_ns),
        decodes_ms=_ms(decodes_ns),
        filled_ms=_ms(sum(terms_ns)),
        terms_ms={name: _ms(term_ns) for name, term_ns in zip(TERM_NAMES, terms_ns, strict=True)},
        binding_term=TERM_NAMES[max(range(len(growth_ns)), key=growth_ns.__getitem__)],
        tightest=None
        if tightest is None
        else Deadline(
            request_id=tightest.request.request_id,
            target_ms=_ms(tightest.request.tbt_target_ns),
            slack_ms=_ms(tightest.slack_ns),
        ),
    )


def _filled_ns(worker: Worker, load: Load, num_prefill: int) -> float:
    return worker.predict_ns(_with_prefill(load, num_prefill))


def _with_prefill(load: Load, num_prefill: int) -> Load:
    filled = load.copy()
    if num_prefill:
        filled.add_chunk(0, num_prefill, is_sampled=False)
    return filled


def _corrected(worker: Worker, load: Load) -> list[float]:
    """Nanoseconds of each term, as the worker's fit has it."""
    return [factor * term for factor, term in zip(worker.fit.factors, worker.roofline.terms(load), strict=True)]


def _ms(ns: float) -> float:
    return round(ns / 1e6, 3)
