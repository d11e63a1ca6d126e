"""The queue: requests without a worker, in the order in which they should begin."""

from bisect import insort
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
        """Take out a request that ends, or begins."""
        self._requests.remove(request)
        self._num_tokens -= len(request.token_ids)

    def note_start(self, now_ns: int) -> None:
        """A request left the queue for a worker."""
        if self._last_start_ns is not None:
            gap_ns = now_ns - self._last_start_ns
            if self._mean_start_gap_ns is None:
                self._mean_start_gap_ns = float(gap_ns)
            self._mean_start_gap_ns += START_GAP_SHARE * (gap_ns - self._mean_start_gap_ns)
        self._last_start_ns = now_ns if self._requests else None

    def predicted_wait_ns(self, prefill_tokens_per_s: float) -> int:
        """How long a request that comes now will wait: until the prompts before it are read, or until as many requests
        have begun at the pace at which they did of late, whichever is longer. 0 while nothing is known."""
        by_tokens = self._num_tokens * 1e9 / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
        by_starts = len(self._requests) * (self._mean_start_gap_ns or 0.0)
        return int(max(by_tokens, by_starts))


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
