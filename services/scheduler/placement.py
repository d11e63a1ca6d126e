"""Which worker takes a waiting request: one queue for all, bound when a worker has room."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from services.scheduler.limits import Limits
from services.scheduler.request import Request
from services.scheduler.worker import Worker

OUTPUT_LEN_SHARE = 0.02
"""Weight of the newest output in the mean length."""
MAX_OVERTAKEN = 8
"""Requests that may begin before one for which there is no room; then room is kept for it."""
MAX_LOOK_PAST = 4
"""Requests without room that a plan looks past, to find one that has."""


@dataclass(slots=True)
class AboutToBegin:
    """What a worker is about to take in the iteration that is being planned, beside what it runs already. Less than
    nothing is what it is about to lose.

    What it runs stays the same meanwhile, so sums over it are taken once, and not for every request that waits.
    """

    worker: Worker
    num_requests: int = 0
    num_blocks: int = 0
    num_expected_tokens: int = 0
    num_prefill_tokens: int = 0
    num_blocks_promised: int | None = None  # to what it runs; None until it is asked for
    num_running_tokens: int | None = None  # that what it runs is expected to hold; None until it is asked for


@dataclass(frozen=True, slots=True)
class Fit:
    """A worker that has room for a request, and what the request finds there."""

    worker: Worker
    num_cached_tokens: int
    num_blocks: int  # free blocks that it would take until its first token
    num_expected_tokens: int


class Placer:
    """Looks for room. expected_output_len says how long outputs are, as far as they have been seen."""

    def __init__(self, limits: Limits, *, reserves_max_len: bool) -> None:
        self._limits = limits
        self._reserves_max_len = reserves_max_len
        self._mean_output_len: float | None = None

    def note_output(self, num_output_tokens: int) -> None:
        """A request ended with so many."""
        if self._mean_output_len is None:
            self._mean_output_len = float(num_output_tokens)
        self._mean_output_len += OUTPUT_LEN_SHARE * (num_output_tokens - self._mean_output_len)

    def to_begin(
        self, worker: Worker, workers: Collection[Worker], waiting: Iterable[Request]
    ) -> Iterator[tuple[Request, Fit]]:
        """Waiting requests that the worker should begin, in their order, as far as it has room for them beside those
        that were asked for already: none if it is not among the workers that count.

        One for which no worker has room does not keep those of its priority waiting that come after it and need less.
        """
        if worker not in workers:
            return
        about = AboutToBegin(worker)
        passed: list[Request] = []
        being_read: dict[tuple[bytes, str], int] | None = None  # until a request might wait for one of them
        for request in waiting:
            if passed and (request.arrived.priority != passed[0].arrived.priority or len(passed) > MAX_LOOK_PAST):
                return
            if not any(self.can_ever_hold(other, request) for other in workers):
                continue  # It came before the worker that could hold it was lost, and blocks nobody meanwhile.
            # One that was preempted waits for nobody: somebody waits for its next token.
            may_wait = self._limits.has_prefix_cache and request.first_planned_ns is None
            key = request.twin_key if may_wait else None
            if key is not None:
                being_read = _being_read(workers) if being_read is None else being_read
                if being_read.get(key, _NOBODY) <= request.arrived.priority:
                    continue  # It will find its prompt in a cache, and blocks nobody either.
            fit = self.best(workers, request, about)
            if fit is None and _may_be_passed(request):
                passed.append(request)
                continue
            if fit is None or fit.worker is not worker:
                return
            about.num_requests += 1
            about.num_blocks += fit.num_blocks
            about.num_expected_tokens += fit.num_expected_tokens
            about.num_prefill_tokens += len(request.token_ids) - fit.num_cached_tokens
            if key is not None and being_read is not None:
                being_read[key] = request.arrived.priority
            yield request, fit

    def best(self, workers: Iterable[Worker], request: Request, about: AboutToBegin) -> Fit | None:
        """The worker that would bring the request's first token soonest; None while none has room.

        That weighs a prefix in a worker's cache against the prompts that wait there already.
        """
        fits = [fit for worker in workers if (fit := self._fit(worker, request, about)) is not None]
        if len(fits) < 2:
            return fits[0] if fits else None
        return min(fits, key=lambda fit: self._cost(fit, request, about))

    def has_room(self, workers: Iterable[Worker], request: Request) -> bool:
        """Whether a worker could begin it now, if its iteration had time for it."""
        return any(self._fit(worker, request, AboutToBegin(worker)) is not None for worker in workers)

    def first_that_fits(self, workers: Collection[Worker], waiting: Iterable[Request]) -> Request | None:
        """The first of those that wait which a worker could hold if it were alone there: the others keep nobody
        waiting."""
        return next((it for it in waiting if any(self.can_ever_hold(worker, it) for worker in workers)), None)

    def would_have_room(self, worker: Worker, request: Request, leaving: Sequence[Request]) -> bool:
        """Whether the worker could begin it if some of those that it runs had left."""
        gone = {other.order for other in leaving}
        staying = [other for other in worker.running if other.order not in gone]
        pool = worker.pool
        shared = set(pool.find(self._prefix_of(worker, request)))
        about = AboutToBegin(
            worker,
            num_requests=-len(leaving),
            num_blocks=-pool.num_held_alone(
                [block for other in leaving for block in other.placed.block_table if block not in shared]
            ),
            num_blocks_promised=worker.num_blocks_promised(staying),
            num_running_tokens=self._expected_tokens(staying),
        )
        return self._fit(worker, request, about) is not None

    def can_ever_hold(self, worker: Worker, request: Request) -> bool:
        """Whether the request fits the worker when it is alone there. Its last token is never computed."""
        return request.max_len - 1 <= worker.capacity

    def _fit(self, worker: Worker, request: Request, about: AboutToBegin) -> Fit | None:
        taken = about if worker is about.worker else AboutToBegin(worker)
        num_running = len(worker.running) + taken.num_requests
        if num_running >= self._limits.max_running or taken.num_requests >= worker.num_free_slots:
            return None
        if not self.can_ever_hold(worker, request):
            return None
        pool = worker.pool
        match = pool.match(self._prefix_of(worker, request))
        num_needed = pool.blocks_for(self._first_need(request)) - match.num_blocks + match.num_free
        # One block a running request stays free, so that decodes that cross a block boundary need not preempt at once.
        # The first request needs no such headroom: alone, it fits.
        if taken.num_blocks_promised is None:
            taken.num_blocks_promised = worker.num_blocks_promised(worker.running)
        num_spoken_for = taken.num_blocks_promised + taken.num_blocks + pool.num_reserved + num_running
        if num_needed + num_spoken_for > pool.num_free:
            return None
        num_expected = self._expected_len(request)
        if num_running:
            if taken.num_running_tokens is None:
                taken.num_running_tokens = self._expected_tokens(worker.running)
            expected = taken.num_expected_tokens + taken.num_running_tokens
            if expected + num_expected > self._limits.overcommit * worker.capacity:
                return None
        return Fit(worker, match.num_blocks * pool.block_size, num_needed, num_expected)

    def _prefix_of(self, worker: Worker, request: Request) -> list[bytes]:
        """Hashes of the blocks that it might find in the worker's cache."""
        return request.prefix_hashes(worker.pool.block_size) if self._limits.has_prefix_cache else []

    def _first_need(self, request: Request) -> int:
        """Tokens whose blocks must be there for it to begin: until its first token, or all where it may not be
        preempted."""
        if self._reserves_max_len or request.num_preemptions >= self._limits.max_preemptions:
            return request.max_len - 1
        return min(len(request.token_ids) + 1, request.max_len - 1)

    def _expected_tokens(self, requests: Iterable[Request]) -> int:
        """Tokens that they are expected to hold at their longest, all together."""
        return sum([self._expected_len(request) for request in requests])

    def _expected_len(self, request: Request) -> int:
        """Tokens that it is expected to hold at its longest."""
        if self._mean_output_len is None:
            return len(request.token_ids)
        # One that has outlived the mean is expected to go on for as long again as a quarter of what it has.
        expected = max(self._mean_output_len, 1.25 * request.num_output_tokens)
        return min(request.max_len, request.arrived.num_prompt_tokens + int(expected))

    def _cost(self, fit: Fit, request: Request, about: AboutToBegin) -> tuple[int, int, int]:
        taken = about if fit.worker is about.worker else AboutToBegin(fit.worker)
        num_to_read = len(request.token_ids) - fit.num_cached_tokens
        num_before = fit.worker.num_prefill_tokens_due() + taken.num_prefill_tokens
        return num_to_read + num_before, len(fit.worker.running) + taken.num_requests, fit.worker.order


_NOBODY = 1 << 31
"""Worse than any priority."""


def _being_read(workers: Iterable[Worker]) -> dict[tuple[bytes, str], int]:
    """The prompts that requests are reading, whose blocks others do not find yet, and the best priority of those that
    read each."""
    placements = (request.placed for worker in workers for request in worker.running)
    reading = (it.request for it in placements if it.num_computed < it.request.arrived.num_prompt_tokens)
    found: dict[tuple[bytes, str], int] = {}
    for request in reading:
        if (key := request.twin_key) is not None:
            found[key] = min(found.get(key, _NOBODY), request.arrived.priority)
    return found


def _may_be_passed(request: Request) -> bool:
    """Not one that was preempted: somebody waits for its next token."""
    return request.first_planned_ns is None and request.num_overtaken < MAX_OVERTAKEN
