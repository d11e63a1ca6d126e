"""The life of one connection, without its transport: HELLO, credit both ways, an orderly or disorderly end.

Credit makes a full link an event. Each side states in its HELLO a window: how many messages it is ready to hold. The
other side counts down as it sends, and up as Credit comes back for messages taken from the mailbox. A socket's own
high-water marks lie above the windows, so no socket ever drops or blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from common.actor.mailbox import Mailbox
from common.messages import ActorMessage, AnyMessage, LinkMessage
from common.messages.links import PROTOCOL_MAJOR, Bye, Credit, Hello, Refused, Role
from common.metrics import LINKS_LOST
from common.wire.codec import MalformedMessage, decode, encode
from common.wire.link import LinkFull, PeerDown, PeerGone, PeerUp, Received

DEFAULT_WINDOW = 1024
"""Messages in flight on one direction of a link: at 200 iterations a second, five seconds of a stopped peer."""
MAX_WINDOW = 65_536
"""The most that a side may state. Sockets have room for as many: they are made before the peer has said its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What a process says of itself on every connection, and whom it talks to there."""

    hello: Hello
    peer_roles: frozenset[Role]
    mailbox: Mailbox


class _State(Enum):
    WAITING = 0  # for the peer's HELLO
    OPEN = 1
    ENDED = 2


class Session:
    """One connection: a Peer to the actor, a state machine to the transport that feeds it."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        dialled: bool,
        transmit: Callable[[bytes], bool],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """transmit hands bytes to the socket at once, and returns whether the socket took them. on_end is called once,
        whichever side ends the connection."""
        self._endpoint = endpoint
        self._dialled = dialled
        self._transmit = transmit
        self._on_end = on_end
        self._state = _State.WAITING
        self._hello: Hello | None = None
        self._num_free = 0
        self._num_taken = 0  # since the last Credit was sent
        self.end_detail = ""  # why the connection ended, once it has

    @property
    def hello(self) -> Hello:
        assert self._hello is not None, "a session is an actor's peer only after its HELLO"
        return self._hello

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def is_open(self) -> bool:
        return self._state is _State.OPEN

    def send(self, message: ActorMessage) -> None:
        if self._state is not _State.OPEN:
            raise PeerGone(self.end_detail)
        if self._num_free == 0:
            raise LinkFull(f"{self.hello.instance_id} holds {self.hello.window} messages that it has not taken")
        self._num_free -= 1
        if not self._transmit(encode(message)):
            self.end("the socket refused a message")
            raise PeerGone(self.end_detail)

    def drop(self, detail: str) -> None:
        if self._state is not _State.ENDED:
            self._transmit(encode(Bye(detail=detail)))
            self.end(detail)

    def start(self) -> None:
        """The transport has connected. The side that dialled speaks first."""
        if self._dialled:
            self._say(self._endpoint.hello)

    def receive(self, data: bytes) -> None:
        """The transport has bytes from the peer."""
        if self._state is _State.ENDED:
            return
        try:
            message = decode(data)
        except MalformedMessage as error:
            self.drop(f"malformed message: {error}")
            return
        if isinstance(message, LinkMessage):
            self._control(message)
        elif self._state is _State.OPEN:
            self._endpoint.mailbox.put(Received(self, message), on_taken=self._taken)
        # Else: the tail of a connection that the peer has not yet seen end. It says HELLO again when it has.

    def end(self, detail: str) -> None:
        """The connection is over, by either side's doing or by the transport's."""
        if self._state is _State.ENDED:
            return
        was_open = self._state is _State.OPEN
        self._state = _State.ENDED
        self.end_detail = detail
        self._num_free = 0
        if was_open:
            LINKS_LOST.labels(self.hello.role).inc()
            self._endpoint.mailbox.put(PeerDown(self, detail))
        self._on_end()

    def _control(self, message: LinkMessage) -> None:
        match message:
            case Hello():
                self._greet(message)
            case Credit():
                self._num_free += message.num_messages
            case Refused() | Bye():
                self.end(message.detail)
            case _:
                assert_never(message)

    def _greet(self, hello: Hello) -> None:
        if self._state is not _State.WAITING:
            self.drop("a second HELLO on one connection")
            return
        if problem := self._problem_of(hello):
            self._say(Refused(detail=problem))
            self.end(problem)
            return
        self._hello = hello
        self._num_free = hello.window
        self._state = _State.OPEN
        LINKS_LOST.labels(hello.role)  # From the first link of a role on, so that a rate sees the first loss.
        # First: where the peer has gone meanwhile, saying HELLO ends the session, and its end is told.
        self._endpoint.mailbox.put(PeerUp(self))
        if not self._dialled:
            self._say(self._endpoint.hello)

    def _problem_of(self, hello: Hello) -> str:
        own_role = self._endpoint.hello.role
        if hello.protocol_major != PROTOCOL_MAJOR:
            return f"protocol {hello.protocol_major} is not {PROTOCOL_MAJOR}, which this {own_role} speaks"
        if hello.role not in self._endpoint.peer_roles:
            expected = ", ".join(sorted(self._endpoint.peer_roles))
            return f"this {own_role} talks to {expected} here, not to a {hello.role}"
        if not 0 < hello.window <= MAX_WINDOW:
            return f"a window of {hello.window} messages is not between 1 and {MAX_WINDOW}"
        return ""

    def _taken(self) -> None:
        """The actor took one of this session's messages from its mailbox."""
        self._num_taken += 1
        # Half a window at a time: the peer never waits, and Credit costs little.
        if self._state is _State.OPEN and self._num_taken >= max(1, self._endpoint.hello.window // 2):
            self._say(Credit(num_messages=self._num_taken))
            self._num_taken = 0

    def _say(self, message: AnyMessage) -> None:
        if not self._transmit(encode(message)):
            self.end("the socket refused a message")
