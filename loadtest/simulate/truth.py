"""How long a plan really takes, as far as the simulated world knows: what the scheduler's predictor has to find out."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.cost.fit import Fit, SavedFit
from common.cost.load import Load
from common.cost.roofline import Roofline


@dataclass(slots=True)
class Work:
    """What a device computes in one iteration."""

    load: Load = field(default_factory=Load)
    chunks: list[tuple[int, int]] = field(default_factory=list)  # start, num_tokens of each prefill chunk

    def without_head(self) -> "Work":
        """The same in a pipeline stage that samples nothing."""
        load = self.load.copy()
        load.num_sampled = 0
        return Work(load, self.chunks)


class Truth(Protocol):
    """One device, or one tensor-parallel group of devices, that holds a model or a pipeline stage of it."""

    def time_ns(self, work: Work) -> float:
        """How long the iteration takes when nothing disturbs it."""
        ...


class RooflineTruth:
    """The roofline that the scheduler starts from, as it is or corrected by a saved fit."""

    def __init__(self, roofline: Roofline, fit: SavedFit | None = None) -> None:
        self._roofline = roofline
        self._fit = Fit(fit)

    def time_ns(self, work: Work) -> float:
        return self._fit.predict_ns(self._roofline.terms(work.load))


@dataclass(frozen=True, slots=True)
class EqualPart:
    """One of several stages that share a whole model's time evenly."""

    whole: Truth
    num_parts: int

    def time_ns(self, work: Work) -> float:
        return self.whole.time_ns(work) / self.num_parts


class Disturbance:
    """What happens to a device beside its work: noise in every iteration, and a lasting slow-down from some moment."""

    def __init__(
        self,
        rng: random.Random,
        *,
        noise: float = 0.0,
        scatter: Sequence[float] = (),
        slowdown_at_ns: int | None = None,
        slowdown: float = 1.0,
    ) -> None:
        """noise is the half-width of a uniform distribution: 0.2 makes an iteration up to 20% longer or shorter.
        scatter holds factors as they were measured, which are taken in that order, from a random one on and round and
        round: slow iterations come in spells, and it is the spells that make queues."""
        self._rng = rng
        self._noise = noise
        self._scatter = scatter
        self._next = rng.randrange(len(scatter)) if scatter else 0
        self._slowdown_at_ns = slowdown_at_ns
        self._slowdown = slowdown

    def factor(self, start_ns: int) -> float:
        """By how much an iteration that starts now is longer. Draws one number each time, where there is noise."""
        factor = 1.0
        if self._scatter:
            factor = self._scatter[self._next]
            self._next = (self._next + 1) % len(self._scatter)
        if self._noise:
            factor += self._rng.uniform(-self._noise, self._noise)
        if self._slowdown_at_ns is not None and start_ns >= self._slowdown_at_ns:
            factor *= self._slowdown
        return factor
