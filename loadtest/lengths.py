"""How long prompts and outputs are: distributions written as short texts.

128                     always 128
uniform:64:512          both ends included
lognormal:400:1500      median 400, P90 1500; a third number cuts: lognormal:400:1500:4096
exp:300                 mean 300; a second number cuts: exp:300:4096
choice:64,1500          one of these, each as often
"""

import math
import random
from collections.abc import Callable

Sampler = Callable[[random.Random], int]
"""Draws one length, at least 1."""

Z_P90 = 1.2815515655446004
"""The standard normal distribution's 90th percentile."""

LENGTH_LIMIT = 10_000_000
"""No request is longer; it catches typing errors before they fill the memory."""


def parse_lengths(text: str) -> Sampler:
    """Return the sampler that the text describes.

    Raises:
        ValueError: If it describes none; the message repeats the text and shows what is possible.
    """
    kind, _, rest = text.partition(":")
    try:
        match kind:
            case "uniform":
                low, high = _integers(rest.split(":"), count=(2, 2))
                if low > high:
                    raise ValueError("the lower end is above the upper one")
                return lambda rng: rng.randint(low, high)
            case "lognormal":
                median, p90, *cut = _integers(rest.split(":"), count=(2, 3))
                return lognormal(median, p90, cut[0] if cut else LENGTH_LIMIT)
            case "exp":
                mean, *cut = _integers(rest.split(":"), count=(1, 2))
                longest = cut[0] if cut else LENGTH_LIMIT
                return lambda rng: min(longest, max(1, round(rng.expovariate(1 / mean))))
            case "choice":
                choices = _integers(rest.split(","), count=(1, 1000))
                return lambda rng: rng.choice(choices)
            case _:
                (fixed,) = _integers([text], count=(1, 1))
                return lambda rng: fixed
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no length ({error}); write 128, uniform:64:512, lognormal:MEDIAN:P90[:MAX], "
            "exp:MEAN[:MAX] or choice:64,1500"
        ) from error


def lognormal(median: int, p90: int, longest: int = LENGTH_LIMIT) -> Sampler:
    """Log-normal lengths with this median and 90th percentile, the shape that production traces come close to."""
    if p90 < median:
        raise ValueError(f"the P90 ({p90}) is below the median ({median})")
    mu, sigma = math.log(median), math.log(p90 / median) / Z_P90
    return lambda rng: min(longest, max(1, round(math.exp(rng.gauss(mu, sigma)))))


def _integers(parts: list[str], count: tuple[int, int]) -> list[int]:
    if not count[0] <= len(parts) <= count[1]:
        raise ValueError(f"{len(parts)} numbers")
    values = [int(part) for part in parts]
    for value in values:
        if not 1 <= value <= LENGTH_LIMIT:
            raise ValueError(f"{value} is not between 1 and {LENGTH_LIMIT}")
    return values
