"""Which running streams an iteration carries, and how long it may take for none of them to be late."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.cost.load import Load
from services.scheduler.request import Placement


@dataclass(frozen=True, slots=True)
class Decodes:
    """The streams that an iteration carries, and the time that their deadlines leave it; None where none has one."""

    placements: list[Placement]
    allowed_ns: float | None


MAX_MARGIN_SHARE = 0.5
"""Of the time that decodes leave before a deadline, what the margin may take. The rest is prefill's: on a machine whose
noise is as large as the target, a margin that holds a small late share would leave prompts nothing, for ever."""


def choose_decodes(
    decoding: list[Placement],
    predict_ns: Callable[[Load], float],
    *,
    margin_ns: float,
    allowance_ns: float,
    lost_ns: float,
    others: Sequence[Placement] = (),
) -> Decodes:
    """Keep every deadline that can be kept.

    All streams run if that is in time for the tightest. If not, those with slack for two more rounds sit this one out,
    most slack first, should that help. A deadline that even then cannot be kept is lost, and no longer counts: the
    iteration keeps to the tightest of the others, and to lost_ns, since those others may be patient.

    Args:
        decoding: Streams that could run, with their slack.
        predict_ns: How long a load takes.
        margin_ns: What is kept free between prediction and deadline, as far as decodes leave twice as much.
        allowance_ns: Of a gap, what the rest of the ring adds.
        lost_ns: What an iteration may take at most that carries streams whose deadline is lost.
        others: Streams that the iteration cannot carry; their slack is how long it may take for their sake.
    """
    decodes = _choose(decoding, predict_ns, margin_ns, allowance_ns, lost_ns)
    return _spare(others, decodes, predict_ns, margin_ns, allowance_ns) if others else decodes


def _choose(
    decoding: list[Placement],
    predict_ns: Callable[[Load], float],
    margin_ns: float,
    allowance_ns: float,
    lost_ns: float,
) -> Decodes:
    if not decoding:
        return Decodes(decoding, None)
    load = Load()
    load.add_decodes(len(decoding), sum([placement.num_planned for placement in decoding]))
    tightest_ns = min([placement.slack_ns for placement in decoding]) - allowance_ns
    needed_ns = predict_ns(load)
    if needed_ns <= tightest_ns:
        return Decodes(decoding, _allowed(tightest_ns, needed_ns, margin_ns))
    patient = [placement for placement in decoding if placement.slack_ns - allowance_ns > 2 * needed_ns]
    if patient and tightest_ns > 0:
        patient.sort(key=lambda placement: (-placement.slack_ns, placement.request.order))
        left_out: set[int] = set()
        for placement in patient:
            load.remove_decode(placement.num_planned)
            left_out.add(placement.request.order)
            if (reduced_ns := predict_ns(load)) <= tightest_ns:
                kept = [placement for placement in decoding if placement.request.order not in left_out]
                return Decodes(kept, _allowed(tightest_ns, reduced_ns, margin_ns))
    slacks = [placement.slack_ns - allowance_ns for placement in decoding]
    in_time = [slack_ns for slack_ns in slacks if slack_ns >= needed_ns]
    if not in_time:
        return Decodes(decoding, tightest_ns)
    return Decodes(decoding, min(lost_ns, _allowed(min(in_time), needed_ns, margin_ns)))


def _spare(
    others: Sequence[Placement],
    decodes: Decodes,
    predict_ns: Callable[[Load], float],
    margin_ns: float,
    allowance_ns: float,
) -> Decodes:
    """Keep the deadlines of others, too, as far as the iteration's decodes alone can."""
    load = Load()
    load.add_decodes(len(decodes.placements), sum([placement.num_planned for placement in decodes.placements]))
    needed_ns = predict_ns(load) if decodes.placements else 0.0
    in_time = [slack_ns for other in others if (slack_ns := other.slack_ns - allowance_ns) >= needed_ns]
    if not in_time:
        return decodes
    allowed_ns = _allowed(min(in_time), needed_ns, margin_ns)
    if decodes.allowed_ns is not None:
        allowed_ns = min(allowed_ns, decodes.allowed_ns)
    return Decodes(decodes.placements, allowed_ns)


def _allowed(slack_ns: float, needed_ns: float, margin_ns: float) -> float:
    return slack_ns - min(margin_ns, MAX_MARGIN_SHARE * (slack_ns - needed_ns))
