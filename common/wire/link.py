"""What an actor sees of its links: peers to send to, and events in its mailbox."""

from dataclasses import dataclass
from typing import Protocol

from common.messages import ActorMessage
from common.messages.links import Hello


class LinkFull(Exception):
    """The peer has not taken what it was sent; the sender decides what gives way. Nothing was sent."""


class PeerGone(Exception):
    """The connection has ended; its PeerDown is in the mailbox or will be. Nothing was sent."""


class Peer(Protocol):
    """One open connection. It starts with PeerUp, ends with PeerDown, and is never reused: a peer that comes back is
    a new Peer."""

    @property
    def hello(self) -> Hello:
        """The peer's HELLO: its role, instance id and, from a worker, its card."""

    @property
    def num_free(self) -> int:
        """Messages that may be sent before the link is full."""

    def send(self, message: ActorMessage) -> None:
        """Send now; never waits.

        Raises:
            LinkFull: If the peer's credit is used up.
            PeerGone: If the connection has ended.
        """

    def drop(self, detail: str) -> None:
        """End the connection from this side. PeerDown follows, as if the peer had been lost."""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A connection is open in both directions."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerDown:
    """A connection is lost, refused or closed. Nothing more comes from this peer."""

    peer: Peer
    detail: str


@dataclass(frozen=True, slots=True)
class Received:
    """A peer sent a message. Taking it from the mailbox gives the peer credit for another."""

    peer: Peer
    message: ActorMessage


LinkEvent = PeerUp | PeerDown | Received
