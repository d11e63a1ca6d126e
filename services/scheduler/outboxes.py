"""What one event has tokenizers told: one message each."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from common.ids import TokenizerId
from common.messages.gaps import WorkerGap
from common.messages.requests import RequestEnded, RequestQueued, RequestRejected, Stamps
from common.messages.streams import PromptScored, StreamBatch, TokensSampled
from services.scheduler.events import SendStreams


@dataclass(slots=True)
class Outbox:
    """What one tokenizer must be told."""

    queued: list[RequestQueued] = field(default_factory=list)
    scored: list[PromptScored] = field(default_factory=list)
    sampled: list[TokensSampled] = field(default_factory=list)
    ended: list[RequestEnded | RequestRejected] = field(default_factory=list)


class Outboxes:
    """Of one event."""

    def __init__(self) -> None:
        self._by_tokenizer: dict[TokenizerId, Outbox] = {}
        self._stamps: Stamps | None = None
        self._gaps: list[WorkerGap] = []

    def of(self, tokenizer_id: TokenizerId) -> Outbox:
        outbox = self._by_tokenizer.get(tokenizer_id)
        if outbox is None:
            outbox = self._by_tokenizer[tokenizer_id] = Outbox()
        return outbox

    def note_result(self, stamps: Stamps, gaps: list[WorkerGap]) -> None:
        """The event is a worker's result: its stamps, and the gaps that it ended, go with the tokens."""
        self._stamps, self._gaps = stamps, gaps

    def effects(self) -> Iterator[SendStreams]:
        """Yield what is to be sent."""
        for tokenizer_id, outbox in self._by_tokenizer.items():
            batch = StreamBatch(
                queued=tuple(outbox.queued),
                scored=tuple(outbox.scored),
                sampled=tuple(outbox.sampled),
                stamps=self._stamps if outbox.sampled else None,
                gaps=tuple(self._gaps) if outbox.sampled else (),
                ended=tuple(outbox.ended),
            )
            yield SendStreams(tokenizer_id=tokenizer_id, batch=batch)
