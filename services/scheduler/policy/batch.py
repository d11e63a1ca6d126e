"""The batch that a policy fills: how much still fits, and what it has taken."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.cost.load import Load
from services.scheduler.events import Bound
from services.scheduler.request import Placement, Request


@dataclass(slots=True, eq=False)
class Candidate:
    """A prompt that could be read on in this iteration."""

    request: Request
    placement: Placement | None  # None while it waits
    start: int  # tokens that precede what it would compute
    num_tokens: int  # the most that it could compute

    def add_to(self, load: Load, num_tokens: int) -> None:
        """Count the first num_tokens of it as computed."""
        load.add_chunk(
            self.start,
            num_tokens,
            is_sampled=num_tokens == self.num_tokens,
            num_scored=self.request.num_scored_in(self.start, num_tokens),
        )

    def remove_from(self, load: Load, num_tokens: int) -> None:
        """Undo add_to."""
        load.remove_chunk(
            self.start,
            num_tokens,
            is_sampled=num_tokens == self.num_tokens,
            num_scored=self.request.num_scored_in(self.start, num_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What a worker runs, each part by rank."""

    decoding: list[Placement]  # one token at its end; a client is watching
    prefilling: list[Candidate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A name, and a function that fills a batch.

    fill takes waiting requests one by one: each that it asks for costs time, and counts as about to begin.
    """

    name: str
    fill: "Callable[[Batch, Running, Iterable[Candidate]], None]"
    is_chunked: bool = True  # it cuts prompts to what fits
    num_shared: int = 1  # prompts that share an iteration, of which the shorter ones are read first
    reserves_max_len: bool = False  # a request begins only where prompt and max_tokens fit beside all others'


@dataclass(slots=True, kw_only=True)
class Room:
    """How much one iteration may hold. Not to be changed; frozen, it would take three times as long to make."""

    max_tokens: int  # that prefill may fill it up to, decodes included
    max_batched_tokens: int  # of whole prompts
    max_chunk_tokens: int  # that the worker takes, decodes included: no plan has more
    min_prefill_tokens: int  # what prefill gets when decodes leave nothing at all
    tile_tokens: int = 1  # the last tile of a matrix product costs as much full as not: more than two end with one
    allowed_ns: float | None = None  # how long it may take; None counts tokens alone
    time_bound: Bound = Bound.DEADLINE  # what allowed_ns comes from
    follows_prefill: bool = False  # the iteration before it computed prompts


class Batch:
    """What is taken so far, and what it takes. Pure arithmetic: blocks are taken when the policy is done."""

    def __init__(self, predict_ns: Callable[[Load], float], room: Room) -> None:
        """predict_ns says how long a load takes; it grows with every row."""
        self.load = Load()
        self.decodes: list[Placement] = []
        self.chunks: list[tuple[Candidate, int]] = []
        self.bound = Bound.NOTHING
        self.room = room
        self._predict_ns = predict_ns

    @property
    def num_left(self) -> int:
        """Tokens that the worker takes beside those that are taken already."""
        return self.room.max_chunk_tokens - self.load.num_tokens

    @property
    def num_batched_left(self) -> int:
        """Tokens of whole prompts that may join those that are taken already."""
        return self.room.max_batched_tokens - self.load.prefill_tokens

    def take_decodes(self, decoding: list[Placement]) -> None:
        """The next token of each of these running streams. They always fit."""
        self.decodes += decoding
        self.load.add_decodes(len(decoding), sum([placement.num_planned for placement in decoding]))

    def take_chunk(self, candidate: Candidate, num_tokens: int) -> None:
        """The next num_tokens of a prompt."""
        assert 0 < num_tokens <= candidate.num_tokens
        self.chunks.append((candidate, num_tokens))
        candidate.add_to(self.load, num_tokens)

    def grow_chunk(self, index: int) -> None:
        """Let the chunk of that index have what is left when all others have taken theirs."""
        candidate, num_tokens = self.chunks[index]
        candidate.remove_from(self.load, num_tokens)
        num_tokens = max(num_tokens, self.largest_chunk(candidate))
        self.chunks[index] = (candidate, num_tokens)
        candidate.add_to(self.load, num_tokens)

    def largest_chunk(self, candidate: Candidate) -> int:
        """Tokens of a prompt that fit beside what is taken already; 0 if none do."""
        room = self.room
        bound = Bound.TOKENS
        fitting = max(0, min(candidate.num_tokens, room.max_tokens - self.load.num_tokens))
        if room.allowed_ns is not None and not self._ends_in_time(candidate, fitting):
            bound = room.time_bound
            fitting = largest_that(lambda num_tokens: self._ends_in_time(candidate, num_tokens), fitting)
        if fitting == candidate.num_tokens:
            return fitting
        floor = min(candidate.num_tokens, room.min_prefill_tokens, self.num_left)
        if fitting == 0 and self.load.prefill_tokens == 0 and floor > 0:
            self.bound = Bound.FLOOR
            return floor
        if self.bound is not Bound.FLOOR:
            self.bound = bound
        return self._aligned(fitting)

    def whole_chunk(self, candidate: Candidate, most: int) -> int:
        """All of a prompt, where that is no more than most and the worker takes it; else 0. The first always fits, cut
        to what the worker takes beside the decodes."""
        num_tokens = candidate.num_tokens
        if self.load.prefill_tokens == 0:
            num_tokens = min(num_tokens, self.num_left)
        elif num_tokens > min(most, self.num_left):
            num_tokens = 0
        if num_tokens < candidate.num_tokens:
            self.bound = Bound.TOKENS
        return num_tokens

    def _ends_in_time(self, candidate: Candidate, num_tokens: int) -> bool:
        assert self.room.allowed_ns is not None
        load = self.load
        if not num_tokens:
            return self._predict_ns(load) <= self.room.allowed_ns
        # Added and taken back: a copy for each question costs as much as the answer.
        candidate.add_to(load, num_tokens)
        predicted_ns = self._predict_ns(load)
        candidate.remove_from(load, num_tokens)
        return predicted_ns <= self.room.allowed_ns

    def _aligned(self, num_tokens: int) -> int:
        tile = self.room.tile_tokens
        total = self.load.num_tokens + num_tokens
        excess = total % tile
        return num_tokens - excess if total > 2 * tile and excess < num_tokens else num_tokens


def largest_that(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number below most that fits, or 0, where most does not and whatever is below one that fits
    does."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
