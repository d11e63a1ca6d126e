"""Messages of the links themselves: who is there, and how much may be sent."""

from enum import StrEnum

from common.ids import InstanceId
from common.messages.base import Message
from common.messages.cards import WorkerCard

PROTOCOL_MAJOR = 1
"""A peer with another major version is refused."""
PROTOCOL_MINOR = 0
"""A peer with another minor version is served: its new fields are optional, ours are ignored by it."""


class Role(StrEnum):
    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    RANK = "rank"  # of a worker of several processes; the worker is its rank 0


class Hello(Message, frozen=True, kw_only=True):
    """The first message of each side of a connection; the side that dialled speaks first."""

    protocol_major: int = PROTOCOL_MAJOR
    protocol_minor: int = PROTOCOL_MINOR
    role: Role
    instance_id: InstanceId
    window: int  # messages that the receiver of this may send before it must wait for Credit
    worker: WorkerCard | None = None  # sent by workers only
    rank: int | None = None  # sent by ranks only, each its own number


class Refused(Message, frozen=True, kw_only=True):
    """The answer to a HELLO that cannot be served; the sender then forgets the connection."""

    detail: str


class Credit(Message, frozen=True, kw_only=True):
    """The receiver has taken num_messages more from its mailbox; as many more may be sent."""

    num_messages: int


class Bye(Message, frozen=True, kw_only=True):
    """An orderly end of the connection, so that the peer need not wait for silence."""

    detail: str
