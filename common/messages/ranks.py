"""Between the ranks of one worker: rank 0 tells the others what to run, and stages tell rank 0 what came of it."""

from common.ids import Slot
from common.messages.base import Message
from common.messages.plans import Plan, SlotScores


class RankReady(Message, frozen=True, kw_only=True):
    """A rank has loaded its part of the model. To rank 0, once."""

    settings: str  # what all ranks must have in common, for people; compared with rank 0's own


class RankStart(Message, frozen=True, kw_only=True):
    """All ranks are ready: meet, agree on the size of the KV pool, and allocate. From rank 0, once."""

    store: str  # where ranks find each other: file://PATH on one machine, tcp://HOST:PORT on several


class RankMeasure(Message, frozen=True, kw_only=True):
    """Run a made-up iteration. From rank 0, before any plan."""

    num_tokens: int


class RankPlan(Message, frozen=True, kw_only=True):
    """Run a plan. From rank 0, to every other rank, in the order in which the scheduler sent them."""

    connection: int  # counts rank 0's connections to a scheduler; a new one's plans begin from nothing
    plan: Plan


class StageDone(Message, frozen=True, kw_only=True):
    """A stage is through with an iteration. From its first rank to rank 0, for each iteration in order.

    What was sampled and scored is as in IterationDone; only the last stage has any.
    """

    busy_ns: int  # the stage's time from start to end, without bubble_ns
    bubble_ns: int  # how long it waited, the plan in hand and nothing else to do, for the stage before it
    slots: tuple[Slot, ...] = ()
    token_ids: tuple[int, ...] = ()
    sampled_scores: tuple[SlotScores, ...] = ()
    prompt_scores: tuple[SlotScores, ...] = ()
