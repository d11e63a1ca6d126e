"""The micro-batches of a pipeline: which streams a plan carries, and what it owes to those that it does not.

A worker of M stages computes M plans at a time, but a decode needs the token before it, which the last stage draws. So
streams are dealt to M micro-batches whose plans take turns: while the tokens of one are on their way through the
stages, the stages before them compute the others. A stream stays in its micro-batch as long as all are about as large.
Prompts belong to none until their last chunk: a chunk needs of the one before it what its own stage has written, so
chunks of one prompt may follow each other plan by plan.
"""

from dataclasses import dataclass

from common.cost.load import Load
from services.scheduler.request import Placement
from services.scheduler.worker import Worker


@dataclass(frozen=True, slots=True)
class Dealt:
    """A worker's streams as one plan sees them. slack_ns of each is now how long that plan may take for its sake."""

    own: list[Placement]  # that it may carry
    others: list[Placement]  # whose tokens come from later plans


def deal(decoding: list[Placement], micro_batch: int, num_stages: int, wait_ns: int) -> Dealt:
    """Divide the streams for a plan of a micro-batch.

    Its own streams wait until it has gone through all stages. If the plan before it is longer, it waits for that at
    each of them, and what is left then is the last stage's time. Streams of others wait until it is out of the way of
    their plans, which are to have room to be as long as this one: with less, a long plan of one micro-batch would leave
    the others only short ones for ever.

    Args:
        decoding: All streams that could run. slack_ns is from the plan's start to their deadlines.
        micro_batch: Whose plan it is.
        num_stages: As many micro-batches as stages.
        wait_ns: From the plan's start until the one before it leaves the last stage.
    """
    dealt = Dealt([], [])
    for placement in decoding:
        slack_ns = placement.slack_ns
        num_plans_later = (placement.micro_batch - micro_batch) % num_stages
        if num_plans_later == 0 and _may_join(placement, micro_batch):
            placement.slack_ns = min(slack_ns, num_stages * (slack_ns - wait_ns))
            dealt.own.append(placement)
        else:
            placement.slack_ns = slack_ns * num_stages // (num_stages + (num_plans_later or num_stages))
            dealt.others.append(placement)
    return dealt


def even_out(
    worker: Worker, micro_batch: int, decoding: list[Placement], *, start_ns: int, now_ns: int, allowance_ns: float
) -> None:
    """Have streams that a micro-batch has beyond its share join the smaller ones, newest first.

    They are in the next plan of that one instead of the coming plan of their own, up to a round later; those whose
    deadline leaves no time for it stay. That is also what keeps a stream from being passed on without end.

    Args:
        worker: A pipeline.
        micro_batch: Whose plan comes.
        decoding: All streams that could run. slack_ns is from the coming plan's start to their deadlines.
        start_ns: When the coming plan starts.
        now_ns: The time.
        allowance_ns: Of a gap, what the rest of the ring adds.
    """
    sizes = [0] * worker.num_stages
    for placement in decoding:
        sizes[placement.micro_batch] += 1
    if sizes[micro_batch] - min(sizes) < 2:
        return
    own = [placement for placement in decoding if placement.micro_batch == micro_batch]
    load = Load()
    load.add_decodes(len(own), sum([placement.num_planned for placement in own]))
    needed_ns = worker.predict_ns(load)
    for placement in reversed(own):
        smaller = _smallest_behind(micro_batch, sizes)
        if sizes[micro_batch] - sizes[smaller] < 2:
            return
        # As long as this micro-batch's decodes take, at least: the plan that it would be in starts when that one's
        # tokens are there, and leaves the last stage behind the coming plan and those between.
        num_plans = (smaller - micro_batch) % worker.num_stages + 1
        end_ns = max(
            worker.start_ns(smaller, now_ns) - start_ns + needed_ns,
            worker.ahead_ns(start_ns) + num_plans * needed_ns / worker.num_stages,
        )
        if end_ns <= placement.slack_ns - allowance_ns - worker.margin.ns:
            placement.micro_batch = smaller
            sizes[micro_batch] -= 1
            sizes[smaller] += 1


def _smallest_behind(micro_batch: int, sizes: list[int]) -> int:
    """The smallest of the other micro-batches; of equal ones that whose turn is next."""
    turns = [(micro_batch + later) % len(sizes) for later in range(1, len(sizes))]
    return min(turns, key=sizes.__getitem__)


def _may_join(placement: Placement, micro_batch: int) -> bool:
    """Whether no other micro-batch's plan is in flight with the stream: it has just come from there."""
    last = placement.last_flight
    return placement.num_in_flight == 0 or last is None or last.micro_batch == micro_batch
