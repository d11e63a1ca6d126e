"""The queue: requests without a worker, in the order in which they should begin."""

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.request import Request

START_GAP_SHARE = 0.1
"""Weight of the newest gap between two requests that began, in the running mean."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What begins before a request does."""

    num_requests: int
    num_tokens: int  # that are read meanwhile


class WaitingQueue:
    """Sorted by rank. Also knows how fast it moves, so that it can say how long a newcomer will wait."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._num_tokens = 0
        self._last_start_ns: int | None = None  # only while others were left waiting
        self._mean_start_gap_ns: float | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_rank)
        self._num_tokens += len(request.token_ids)

    def remove(self, request: Request) -> None:
        """Take out a request that ends without having begun."""
        self._take_out(request)
        if not self._requests:
            self.forget_last_start()

    def forget_last_start(self) -> None:
        """Nobody waits any more for what would begin next: the time until then says nothing of the queue's pace."""
        self._last_start_ns = None

    def take(self, request: Request) -> None:
        """Take out a request that begins. Those before it are overtaken."""
        for other in self._requests:
            if other is request:
                break
            other.num_overtaken += 1
        self._take_out(request)

    def note_start(self, now_ns: int) -> None:
        """A request left the queue for a worker."""
        if self._last_start_ns is not None:
            gap_ns = now_ns - self._last_start_ns
            if self._mean_start_gap_ns is None:
                self._mean_start_gap_ns = float(gap_ns)
            self._mean_start_gap_ns += START_GAP_SHARE * (gap_ns - self._mean_start_gap_ns)
        self._last_start_ns = now_ns if self._requests else None

    def ahead_of(self, priority: int, num_tokens: int, num_places: int, *, is_shared: bool = False) -> Ahead:
        """What would begin before a request of this priority and length that comes now.

        Args:
            priority: Its own.
            num_tokens: Of its prompt.
            num_places: Prompts that are looked at together, of which the shorter ones are read first; 1 where the queue
                moves in order. As many at least as must begin for it to be among them count, the shortest ones: they
                are the first to be read.
            is_shared: Whether requests find each other's prompts in a cache: of those with the same one counts.
        """
        older = self._requests[: bisect_right(self._requests, priority, key=lambda request: request.arrived.priority)]
        if is_shared:
            older = list({request.twin_key or request.order: request for request in older}.values())
        if num_places <= 1:
            return Ahead(len(older), sum(len(request.token_ids) for request in older))
        by_urgency = sorted((request.arrived.priority, len(request.token_ids)) for request in older)
        num_ahead = max(len(older) - num_places + 1, bisect_right(by_urgency, (priority, num_tokens)))
        # The oldest one takes half of what is read, whatever its length.
        shorter = sum(length for _, length in by_urgency[:num_ahead])
        return Ahead(num_ahead, min(2 * shorter, sum(length for _, length in by_urgency)))

    def predicted_wait_ns(self, prefill_tokens_per_s: float, ahead: Ahead | None = None) -> int:
        """How long until so many have begun, or all that wait: until their prompts are read, or until as many requests
        have begun at the pace at which they did of late, whichever is longer. 0 while nothing is known."""
        if ahead is None:
            ahead = Ahead(len(self._requests), self._num_tokens)
        by_tokens = ahead.num_tokens * 1e9 / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
        by_starts = ahead.num_requests * (self._mean_start_gap_ns or 0.0)
        return int(max(by_tokens, by_starts))

    def _take_out(self, request: Request) -> None:
        self._requests.remove(request)
        self._num_tokens -= len(request.token_ids)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
