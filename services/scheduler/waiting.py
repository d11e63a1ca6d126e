"""The queue: requests without a worker, in the order in which they should begin."""

from bisect import bisect_right, insort
from collections.abc import Iterator

from services.scheduler.request import Request

START_GAP_SHARE = 0.1
"""Weight of the newest gap between two requests that began, in the running mean."""


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

    @property
    def first(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_rank)
        self._num_tokens += len(request.token_ids)

    def remove(self, request: Request) -> None:
        """Take out a request that ends, or begins (see take)."""
        self._requests.remove(request)
        self._num_tokens -= len(request.token_ids)

    def take(self, request: Request) -> None:
        """Take out a request that begins. Those before it are overtaken."""
        for other in self._requests:
            if other is request:
                break
            other.num_overtaken += 1
        self.remove(request)

    def note_start(self, now_ns: int) -> None:
        """A request left the queue for a worker."""
        if self._last_start_ns is not None:
            gap_ns = now_ns - self._last_start_ns
            if self._mean_start_gap_ns is None:
                self._mean_start_gap_ns = float(gap_ns)
            self._mean_start_gap_ns += START_GAP_SHARE * (gap_ns - self._mean_start_gap_ns)
        self._last_start_ns = now_ns if self._requests else None

    def num_before(self, priority: int) -> int:
        """How many would begin before a request of this priority that comes now."""
        return bisect_right(self._requests, priority, key=lambda request: request.arrived.priority)

    def predicted_wait_ns(self, prefill_tokens_per_s: float, num_before: int) -> int:
        """How long a request with so many before it will wait: until their prompts are read, or until as many requests
        have begun at the pace at which they did of late, whichever is longer. 0 while nothing is known."""
        num_tokens = self._num_tokens
        if num_before < len(self._requests):
            num_tokens = sum(len(request.token_ids) for request in self._requests[:num_before])
        by_tokens = num_tokens * 1e9 / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
        by_starts = num_before * (self._mean_start_gap_ns or 0.0)
        return int(max(by_tokens, by_starts))


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
