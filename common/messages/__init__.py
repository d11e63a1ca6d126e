"""Everything that travels on a socket: one closed union of frozen structs.

Modules by link: `links` (every link), `cards` (going up), `requests` (gateway and tokenizer), `streams` (tokenizer and
scheduler), `plans` (scheduler and worker), `ranks` (the ranks of one worker).
"""

from common.messages.cards import PoolCard
from common.messages.links import Bye, Credit, Hello, Refused
from common.messages.plans import IterationDone, Plan, PlanRefused
from common.messages.ranks import RankMeasure, RankPlan, RankReady, RankStart, StageDone
from common.messages.requests import CallFailed, Cancel, Decode, Decoded, Encode, Encoded, Submit, TextBatch
from common.messages.streams import RequestArrived, StopReached, StreamBatch

LinkMessage = Hello | Refused | Credit | Bye
"""Handled by the link; an actor never sees one."""

ActorMessage = (
    PoolCard
    | Submit
    | Cancel
    | Encode
    | Encoded
    | Decode
    | Decoded
    | CallFailed
    | TextBatch
    | RequestArrived
    | StopReached
    | StreamBatch
    | Plan
    | IterationDone
    | PlanRefused
    | RankReady
    | RankStart
    | RankMeasure
    | RankPlan
    | StageDone
)

AnyMessage = LinkMessage | ActorMessage

__all__ = [
    "ActorMessage",
    "AnyMessage",
    "Bye",
    "CallFailed",
    "Cancel",
    "Credit",
    "Decode",
    "Decoded",
    "Encode",
    "Encoded",
    "Hello",
    "IterationDone",
    "LinkMessage",
    "Plan",
    "PlanRefused",
    "PoolCard",
    "RankMeasure",
    "RankPlan",
    "RankReady",
    "RankStart",
    "Refused",
    "RequestArrived",
    "StageDone",
    "StopReached",
    "StreamBatch",
    "Submit",
    "TextBatch",
]
