"""Quantiles in bounded memory."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulate.sketch import RELATIVE_ERROR, Sketch

VALUES = st.lists(st.integers(0, 10**13), min_size=1, max_size=200)


def sketch_of(values: list[int]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


@given(VALUES, st.floats(0, 1))
def test_a_quantile_is_within_the_relative_error_of_a_value_of_that_rank(values: list[int], share: float) -> None:
    found = sketch_of(values).quantile(share)
    exact = sorted(values)[int(share * (len(values) - 1))]
    assert found is not None
    assert abs(found - exact) <= RELATIVE_ERROR * exact + 1


@given(VALUES)
def test_the_largest_value_and_the_mean_are_exact(values: list[int]) -> None:
    sketch = sketch_of(values)
    assert sketch.quantile(1) == max(values)
    assert sketch.mean() == sum(values) / len(values)


@given(VALUES, VALUES)
def test_two_sketches_merge_to_the_sketch_of_both(some: list[int], others: list[int]) -> None:
    merged = sketch_of(some)
    merged.merge(sketch_of(others))
    assert merged == sketch_of([*some, *others])


def test_a_count_is_as_many_values() -> None:
    sketch = Sketch()
    sketch.add(20, count=3)
    assert sketch == sketch_of([20, 20, 20])


def test_no_values_have_no_quantile() -> None:
    assert Sketch().quantile(0.5) is None
    assert Sketch().summary_ms() == dict.fromkeys(("p50", "p90", "p99", "p999", "max"))


def test_values_above_a_bound_are_counted() -> None:
    assert sketch_of([1_000, 2_000, 3_000_000]).num_above(2_000) == 1


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    rng = random.Random(0)
    sketch = sketch_of([int(rng.lognormvariate(16, 2)) for _ in range(50_000)])
    assert len(sketch.counts) < 3_300
    assert sketch.num_values == 50_000


def test_a_summary_is_in_milliseconds() -> None:
    assert sketch_of([2_000_000]).summary_ms()["p50"] == pytest.approx(2, rel=RELATIVE_ERROR)
