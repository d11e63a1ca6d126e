"""When requests arrive."""

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import NS_PER_S
from loadtest import arrivals


def gaps_s(offsets: "itertools.islice[int]") -> list[float]:
    return [(b - a) / NS_PER_S for a, b in itertools.pairwise(offsets)]


def test_poisson_gaps_are_exponential_with_no_tail_cut_off() -> None:
    gaps = gaps_s(itertools.islice(arrivals.poisson(10.0, random.Random(1)), 50_000))

    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.03)
    # One gap in e^8 is above eight means; of 50,000, about seventeen.
    assert 5 <= sum(gap > 0.8 for gap in gaps) <= 40


def test_constant_arrivals_do_not_drift() -> None:
    offsets = list(itertools.islice(arrivals.constant(3.0), 30_001))

    assert offsets[0] == 0
    assert offsets[30_000] == 10_000 * NS_PER_S


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_bursty_arrivals_keep_the_rate_and_have_the_burstiness_asked_for(burstiness: float) -> None:
    gaps = gaps_s(itertools.islice(arrivals.bursty(10.0, burstiness, random.Random(2)), 50_000))

    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.variance(gaps) / statistics.mean(gaps) ** 2 == pytest.approx(burstiness, rel=0.15)


def test_a_replayed_trace_keeps_its_gaps_and_goes_on_after_its_end() -> None:
    offsets = list(itertools.islice(arrivals.replay([5, 15, 45]), 6))

    # The mean gap is 20; it separates one round from the next.
    assert offsets == [0, 10, 40, 60, 70, 100]


def test_a_replayed_trace_can_be_squeezed_to_a_rate_without_losing_its_bursts() -> None:
    second = NS_PER_S
    offsets = list(itertools.islice(arrivals.replay([0, 1 * second, 4 * second], rate_rps=1.0), 4))

    assert offsets == [0, second // 2, 2 * second, 3 * second]


@given(seed=st.integers(0, 1000), rate_rps=st.floats(0.01, 10_000))
def test_arrivals_are_in_order_and_a_function_of_the_seed(seed: int, rate_rps: float) -> None:
    once = list(itertools.islice(arrivals.poisson(rate_rps, random.Random(seed)), 50))
    again = list(itertools.islice(arrivals.poisson(rate_rps, random.Random(seed)), 50))

    assert once == again == sorted(once)


@pytest.mark.parametrize("rate_rps", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate_rps: float) -> None:
    with pytest.raises(ValueError, match="requests per second"):
        arrivals.constant(rate_rps)
    with pytest.raises(ValueError, match="requests per second"):
        arrivals.poisson(rate_rps, random.Random(0))


def test_a_trace_without_a_span_of_time_is_refused() -> None:
    with pytest.raises(ValueError, match="two arrivals"):
        arrivals.replay([3])
    with pytest.raises(ValueError, match="one instant"):
        arrivals.replay([3, 3])
