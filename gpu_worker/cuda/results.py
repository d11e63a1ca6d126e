"""What comes of an iteration, and how it lies in the one buffer that the host reads of it.

First the drawn tokens. Then a record for each token whose log-probability is wanted, 1 + 2 * num_top words: the
logarithm's bits, the likeliest tokens in its place, and the bits of theirs; num_top is the most that any request wants.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.ids import Slot
from common.messages.logprobs import MAX_TOP, TokenScores
from common.messages.plans import SlotScores
from gpu_worker.cuda.device import Event
from gpu_worker.slots import Row

MAX_RECORD_LEN = 1 + 2 * MAX_TOP


@dataclass(frozen=True, slots=True)
class Computed:
    """What came of an iteration."""

    token_ids: list[int]  # one for each sampled row, in the rows' order
    device_ns: int  # without bubble_ns
    bubble_ns: int = 0  # how long the device waited for other ranks, this iteration at hand
    sampled_scores: list[SlotScores] = field(default_factory=list)
    prompt_scores: list[SlotScores] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request wants the log-probabilities of some neighbouring tokens."""

    slot: Slot
    first_index: int  # of the first one in prompt and output together
    num_tokens: int
    num_top: int


@dataclass(frozen=True, slots=True)
class WantedScores:
    """Whose log-probabilities an iteration brings; their records lie in this order."""

    sampled: tuple[Wanted, ...]  # of one token each
    prompt: tuple[Wanted, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "WantedScores":
        """Return what these rows want, in their order."""
        sampled, prompt = [], []
        for row in rows:
            slot, sampling, scored = row.resident.slot, row.resident.sampling, row.scored
            if scored:
                prompt.append(Wanted(slot, scored.start, len(scored), sampling.prompt_logprobs or 0))
            if row.is_sampled and sampling.logprobs is not None:
                sampled.append(Wanted(slot, row.start + row.num_tokens, 1, sampling.logprobs))
        return cls(tuple(sampled), tuple(prompt))

    @property
    def num_records(self) -> int:
        return sum(wanted.num_tokens for wanted in (*self.sampled, *self.prompt))

    @property
    def record_len(self) -> int:
        """Words of a record."""
        num_top = max((wanted.num_top for wanted in (*self.sampled, *self.prompt)), default=0)
        assert num_top <= MAX_TOP, "the gateway lets no more through, and buffers hold no more"
        return 1 + 2 * num_top


class Launched:
    """An iteration that the device has been given."""

    def __init__(
        self,
        order: Sequence[int],
        wanted: WantedScores,
        output: Tensor,
        started: Event,
        ready: Event,
        finished: Event,
        copied: Event,
    ) -> None:
        """Keep what wait will need.

        Args:
            order: For each sampled row its place among the drawn tokens.
            wanted: Whose records there are.
            output: (words,) int32 host memory, written when copied has come: the tokens, then the records.
            started: Recorded before the iteration.
            ready: Recorded when what it needs from other ranks was there.
            finished: Recorded after it.
            copied: Recorded after the copy to output.
        """
        self._order = order
        self._wanted = wanted
        self._output = output
        self._started = started
        self._ready = ready
        self._finished = finished
        self._copied = copied

    def wait(self) -> Computed:
        """Wait for the device, and return the result. In any thread, once, in the order of launching."""
        self._copied.wait()  # The iteration's one wait for the device.
        words = self._output.numpy()
        drawn = words[: len(self._order)].tolist()
        records = words[len(drawn) :].reshape(self._wanted.num_records, self._wanted.record_len)
        num_sampled = len(self._wanted.sampled)
        return Computed(
            token_ids=[drawn[place] for place in self._order],
            device_ns=int(self._finished.ms_since(self._ready) * 1e6),
            bubble_ns=int(self._ready.ms_since(self._started) * 1e6),
            sampled_scores=list(_scores(self._wanted.sampled, records[:num_sampled])),
            prompt_scores=list(_scores(self._wanted.prompt, records[num_sampled:])),
        )


def _scores(wanted: Sequence[Wanted], records: NDArray[np.int32]) -> Iterator[SlotScores]:
    """Yield what records, (tokens, record_len), say, for each request in turn."""
    top = records.shape[1] // 2  # Words of the likeliest tokens; a request takes the first of them that it wants.
    start = 0
    for each in wanted:
        mine = records[start : start + each.num_tokens]
        bits = np.ascontiguousarray(mine[:, 1 + top : 1 + top + each.num_top])
        scores = TokenScores.of(
            np.ascontiguousarray(mine[:, 0]).view(np.float32),
            mine[:, 1 : 1 + each.num_top].ravel(),
            bits.view(np.float32).ravel(),
        )
        yield SlotScores(each.slot, each.first_index, scores)
        start += each.num_tokens
