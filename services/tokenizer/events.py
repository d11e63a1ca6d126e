"""What can happen to the tokenizer's core, and what it wants done."""

from dataclasses import dataclass
from typing import NewType

from common.ids import RequestId
from common.messages import (
    CallFailed,
    Cancel,
    Decode,
    Decoded,
    Encode,
    Encoded,
    PoolCard,
    RequestArrived,
    StopReached,
    StreamBatch,
    Submit,
    TextBatch,
)
from services.tokenizer.jobs import Job, JobId, JobResult

GatewayLink = NewType("GatewayLink", int)
"""One connection of a gateway; one that comes back has another."""


@dataclass(frozen=True, slots=True)
class GatewayUp:
    gateway: GatewayLink


@dataclass(frozen=True, slots=True)
class GatewayDown:
    gateway: GatewayLink


@dataclass(frozen=True, slots=True)
class FromGateway:
    gateway: GatewayLink
    message: Submit | Cancel | Encode | Decode


@dataclass(frozen=True, slots=True)
class SchedulerUp:
    pass


@dataclass(frozen=True, slots=True)
class SchedulerDown:
    detail: str


@dataclass(frozen=True, slots=True)
class FromScheduler:
    message: StreamBatch | PoolCard


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job came back; exactly once for each StartJob. Without a result it never ran, because of a DropJob."""

    job_id: JobId
    result: JobResult | None


@dataclass(frozen=True, slots=True)
class ArrivalNotSent:
    """The link to the scheduler had no room for a RequestArrived."""

    request_id: RequestId
    detail: str


Event = GatewayUp | GatewayDown | FromGateway | SchedulerUp | SchedulerDown | FromScheduler | JobDone | ArrivalNotSent


@dataclass(frozen=True, slots=True)
class ToGateway:
    gateway: GatewayLink
    message: TextBatch | PoolCard | Encoded | Decoded | CallFailed


@dataclass(frozen=True, slots=True)
class ToScheduler:
    message: RequestArrived | StopReached | Cancel


@dataclass(frozen=True, slots=True)
class StartJob:
    job: Job


@dataclass(frozen=True, slots=True)
class DropJob:
    """Nobody waits for this job; it need not run. Its JobDone comes all the same."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class DropGateway:
    """This gateway breaks the protocol: its link is to be treated as lost."""

    gateway: GatewayLink
    detail: str


@dataclass(frozen=True, slots=True)
class DropScheduler:
    """A token is missing: the link is to be treated as lost."""

    detail: str


Effect = ToGateway | ToScheduler | StartJob | DropJob | DropGateway | DropScheduler
