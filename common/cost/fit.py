"""A correction of the roofline's terms by what a worker measured: robust recursive least squares on relative error."""

from collections.abc import Sequence

import msgspec

from common.cost.roofline import TERM_NAMES, Terms

NUM_TERMS = len(TERM_NAMES)
PRIOR_SD = (3.0, 0.4, 0.4, 0.4, 0.4, 0.2)
"""How far each factor may lie from 1 before anything is measured."""
REVERSION = 0.999
"""Of a factor's distance from 1, what is left one iteration later unless measurements hold it there. They do for terms
that iterations show apart, and the fit follows a device that changes within some tens of iterations. A factor that
nothing shows goes back to 1, within a thousand iterations, and never becomes more uncertain than PRIOR_SD: mere
forgetting would let what a long run of equal iterations cannot tell apart drift without end (hundreds of times its
term, in simulated hours of decoding), to be found out by the next prompt."""
NOISE = 0.03
"""Relative error of a measurement that says nothing: iterations of one load differ by at least so much."""
SD_OF_ERROR = 1.25
"""Standard deviation of a normal distribution, over the mean of its absolute values."""
OUTLIER = 3.0
"""A residual counts in full up to so many times the running error, and by its square root beyond (Huber's weights)."""
ERROR_SHARE = 0.02
"""Weight of the newest residual in the running error."""
MAX_RATIO = 8.0
"""A measurement so many times above its prediction, or below its inverse, is no iteration of the model: the machine
slept, or a clock jumped. It is counted and dropped, unless MAX_DROPS come in a row."""
MAX_DROPS = 8


class SavedFit(msgspec.Struct, frozen=True, kw_only=True):
    """A fit on disk, for the next start of the same device, model and layout."""

    factors: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    error: float
    num_measured: int


class Fit:
    """Factors of the terms: a Kalman filter of factors that wander about 1. Predicts sum(factor * term)."""

    def __init__(self, saved: SavedFit | None = None) -> None:
        self.factors = [1.0] * NUM_TERMS
        self.error = 0.15  # running mean of |relative residual|
        self.num_measured = 0
        self.num_dropped = 0
        self._drops_in_a_row = 0
        self._covariance = [
            [PRIOR_SD[row] ** 2 if row == column else 0.0 for column in range(NUM_TERMS)] for row in range(NUM_TERMS)
        ]
        if saved is not None and len(saved.factors) == NUM_TERMS:
            self.factors = list(saved.factors)
            self._covariance = [list(row) for row in saved.covariance]
            self.error, self.num_measured = saved.error, saved.num_measured

    def predict_ns(self, terms: Terms) -> float:
        """The corrected time of an iteration."""
        return _dot(self.factors, terms)

    def learn(self, terms: Terms, measured_ns: float) -> None:
        """Take one measured iteration in."""
        predicted_ns = self.predict_ns(terms)
        if measured_ns <= 0 or not 1 / MAX_RATIO < measured_ns / max(predicted_ns, 1.0) < MAX_RATIO:
            self.num_dropped += 1
            self._drops_in_a_row += 1
            if measured_ns <= 0 or self._drops_in_a_row < MAX_DROPS:
                return
        self._drops_in_a_row = 0
        # Relative to the prediction: relative to what was measured, noise would pull the fit below the mean.
        scale = 1.0 / max(predicted_ns, 1.0)
        residual = measured_ns * scale - 1.0
        noise = max(NOISE, SD_OF_ERROR * self.error)
        weight = 1.0 if abs(residual) <= OUTLIER * noise else OUTLIER * noise / abs(residual)
        self.error += ERROR_SHARE * (min(abs(residual), 1.0) - self.error)
        self.num_measured += 1
        self._wander()
        self._update([term * scale for term in terms], measured_ns * scale, noise * noise / weight)

    def save(self) -> SavedFit:
        return SavedFit(
            factors=tuple(self.factors),
            covariance=tuple(tuple(row) for row in self._covariance),
            error=self.error,
            num_measured=self.num_measured,
        )

    def _wander(self) -> None:
        """What an iteration's time does to factors and their uncertainty, before anything is measured."""
        self.factors = [1.0 + REVERSION * (factor - 1.0) for factor in self.factors]
        self._covariance = [_scaled(row) for row in self._covariance]
        for index, gained in enumerate(_WANDERING):
            self._covariance[index][index] += gained

    def _update(self, inputs: Sequence[float], measured: float, noise_variance: float) -> None:
        residual = measured - _dot(self.factors, inputs)
        spread = [_dot(row, inputs) for row in self._covariance]
        variance = noise_variance + _dot(inputs, spread)
        step = residual / variance
        self.factors = [max(0.0, factor + step * spread[index]) for index, factor in enumerate(self.factors)]
        # The root goes to both sides of the outer product: so the covariance stays symmetric to the last bit.
        root = variance**-0.5
        known = [root * value for value in spread]
        self._covariance = [_without(row, known[index], known) for index, row in enumerate(self._covariance)]


_SHARE = REVERSION * REVERSION
_WANDERING = tuple([(1.0 - _SHARE) * sd**2 for sd in PRIOR_SD])
"""Variance that each factor gains in an iteration."""


# Written out: a loop over six values takes three times as long, and these are most of what predicting and learning
# cost.


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3] + a[4] * b[4] + a[5] * b[5]


def _scaled(row: Sequence[float]) -> list[float]:
    return [_SHARE * row[0], _SHARE * row[1], _SHARE * row[2], _SHARE * row[3], _SHARE * row[4], _SHARE * row[5]]


def _without(row: Sequence[float], across: float, along: Sequence[float]) -> list[float]:
    """A row of the covariance less that row of an outer product."""
    return [
        row[0] - across * along[0],
        row[1] - across * along[1],
        row[2] - across * along[2],
        row[3] - across * along[3],
        row[4] - across * along[4],
        row[5] - across * along[5],
    ]
