"""Percentiles and their confidence intervals."""

import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.stats import QUANTILES, Sample, _weighted_quantiles, confidence_intervals, difference_interval, summarize


def test_quantiles_lie_between_neighbouring_values() -> None:
    found = summarize([float(value) for value in range(101)])

    assert found == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9, "max": 100.0}


def test_nothing_has_no_quantiles() -> None:
    assert summarize([]) == dict.fromkeys(QUANTILES)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 4)), min_size=1, max_size=40))
def test_weights_count_a_value_as_often_as_they_say(weighted: list[tuple[float, int]]) -> None:
    weighted.sort()
    repeated = [value for value, weight in weighted for _ in range(weight)]
    found = _weighted_quantiles(np.array([v for v, _ in weighted]), np.array([w for _, w in weighted]))

    if not repeated:
        assert found is None
    else:
        assert found is not None
        assert list(found) == pytest.approx(list(np.quantile(repeated, list(QUANTILES.values()))))


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = random.Random(5)
    truth = 10 * 0.6931471805599453  # the median of an exponential distribution of mean 10
    covered = 0
    for _ in range(100):
        intervals = confidence_intervals(Sample.of([[rng.expovariate(0.1)] for _ in range(100)]))
        assert intervals is not None
        covered += intervals["p50"][0] <= truth <= intervals["p50"][1]

    assert 88 <= covered <= 100


def test_a_request_whose_gaps_are_alike_counts_as_one_observation() -> None:
    """A hundred equal gaps of one stream are no surer than one gap of it."""
    levels = [random.Random(6).gauss(50, 10) for _ in range(40)]
    rng = random.Random(6)
    levels = [rng.gauss(50, 10) for _ in range(40)]
    clustered = confidence_intervals(Sample.of([[level] * 100 for level in levels]))
    single = confidence_intervals(Sample.of([[level] for level in levels]))
    naive = confidence_intervals(Sample.of([[level] for level in levels for _ in range(100)]))

    assert clustered is not None
    assert single is not None
    assert naive is not None
    width = {
        name: found["p50"][1] - found["p50"][0]
        for name, found in {"clustered": clustered, "single": single, "naive": naive}.items()
    }
    assert width["clustered"] == pytest.approx(width["single"], rel=0.35)
    assert width["naive"] < width["clustered"] / 2


def test_one_request_alone_has_no_interval() -> None:
    assert confidence_intervals(Sample.of([[1.0, 2.0, 3.0]])) is None
    assert confidence_intervals(Sample.of([])) is None


def test_the_difference_of_two_estimates_is_as_uncertain_as_both_together() -> None:
    low, high = difference_interval(10.0, (7.0, 13.0), 20.0, (16.0, 24.0))

    assert (low, high) == (5.0, 15.0)


def test_the_interval_of_a_difference_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(40):
        a = [rng.expovariate(0.1) for _ in range(150)]
        b = [rng.expovariate(0.05) for _ in range(150)]
        a_found, b_found = (confidence_intervals(Sample.of([[value] for value in values])) for values in (a, b))
        assert a_found is not None
        assert b_found is not None
        low, high = difference_interval(statistics.median(a), a_found["p50"], statistics.median(b), b_found["p50"])
        covered += low <= 10 * 0.6931471805599453 <= high

    assert covered >= 34
