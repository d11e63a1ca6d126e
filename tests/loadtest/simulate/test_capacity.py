"""The search for a capacity, in simulation."""

from dataclasses import replace
from typing import Any

import pytest

from loadtest.simulate.capacity import CapacityOptions, search
from loadtest.simulate.measures import Outcome
from loadtest.simulate.options import SimulateOptions
from loadtest.simulate.runs import Job, run_one
from loadtest.simulate.verdict import Criterion

SMALL: dict[str, Any] = {"workload": "azure_2023_code", "requests": 30, "prefix_cache": False}
"""Short outputs: quick to simulate."""
SECOND_NS = 1_000_000_000


def outcome_of(*, gaps: int = 1000, late: int = 0, delays_s: tuple[float, ...] = (0.1,), rejected: int = 0) -> Outcome:
    outcome = Outcome(targets_ns=[100], num_late=[late], num_arrived=100, num_rejected=rejected)
    outcome.tbt.add(50, gaps)
    for delay_s in delays_s:
        outcome.scheduling_delay.add(int(delay_s * SECOND_NS))
    return outcome


@pytest.mark.parametrize(
    ("outcome", "holds"),
    [
        (outcome_of(), True),
        (outcome_of(late=10), True),
        (outcome_of(late=11), False),
        (outcome_of(delays_s=(0.1, 1.9, 60)), True),
        (outcome_of(delays_s=(0.1, 2.1, 60)), False),
        (outcome_of(rejected=1), True),
        (outcome_of(rejected=2), False),
        (outcome_of(delays_s=()), False),
    ],
)
def test_a_run_holds_by_its_gaps_its_median_delay_and_its_refusals(outcome: Outcome, holds: bool) -> None:
    assert Criterion().holds(outcome) is holds


def test_a_run_that_is_lost_ends_early() -> None:
    options = SimulateOptions(**SMALL | {"rate": 200.0, "requests": 120, "max_running": 4})
    whole = run_one(Job(options=options, seed=0))
    cut = run_one(Job(options=options, seed=0, criterion=Criterion(max_delay_ns=SECOND_NS // 2)))
    assert not Criterion(max_delay_ns=SECOND_NS // 2).holds(whole)
    assert cut.is_cut_short
    assert cut.num_iterations < whole.num_iterations
    assert not Criterion().holds(cut), "nothing is claimed of a run that was cut short"


def test_a_run_that_holds_is_never_cut_short() -> None:
    options = SimulateOptions(**SMALL | {"rate": 2.0})
    assert run_one(Job(options=options, seed=0, criterion=Criterion())) == run_one(Job(options=options, seed=0))


def test_the_capacity_found_holds_and_a_little_more_does_not() -> None:
    options = CapacityOptions(
        **SMALL, seed=(0, 1), rate=4.0, max_running=4, max_delay_s=0.2, precision_percent=10.0, processes=1
    )
    lines: list[str] = []
    found = search(options, lines.append)
    assert found.low_rps <= found.rate_rps <= found.high_rps
    assert sorted(found.by_seed) == [found.low_rps, found.high_rps]
    assert found.num_probes == len(lines)
    for seed, rate_rps in enumerate(found.by_seed):
        for factor, holds in ((1.0, True), (1.1, False)):
            probe = replace(options.plain(), rate=factor * rate_rps)
            assert options.criterion.holds(run_one(Job(options=probe, seed=seed))) is holds


def test_a_tighter_target_has_no_more_capacity() -> None:
    tight, loose = (
        search(
            CapacityOptions(
                **SMALL,
                seed=(0,),
                rate=2.0,
                tbt_target_ms=target_ms,
                policy="prefill_first",
                token_budget=8192,
                precision_percent=50.0,
                most_rate=8.0,
            )
        )
        for target_ms in (50.0, 1000.0)
    )
    assert tight.rate_rps < loose.rate_rps


def test_options_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="not in order"):
        CapacityOptions(least_rate=3.0, most_rate=2.0)
