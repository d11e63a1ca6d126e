"""How long plans take on simulated devices."""

import csv
import random
from pathlib import Path

import pytest

from common.cost.devices import DEVICES
from common.cost.roofline import Roofline
from common.cost.shapes import SHAPES
from loadtest.simulate.generated import generated_rows
from loadtest.simulate.tables import TILE, Curve, TableTruth
from loadtest.simulate.truth import Disturbance, RooflineTruth, Work

A100 = DEVICES["a100-80"]
MISTRAL = SHAPES["mistral-7b"]


@pytest.fixture(scope="module")
def tables() -> TableTruth:
    return TableTruth(MISTRAL, A100, 1, None)


def work_of(*chunks: tuple[int, int], decodes: int = 0, context: int = 1000) -> Work:
    work = Work(chunks=list(chunks))
    for start, num_tokens in chunks:
        work.load.add_chunk(start, num_tokens, is_sampled=True)
    work.load.add_decodes(decodes, decodes * context)
    return work


def test_the_default_truth_is_what_the_scheduler_starts_from() -> None:
    roofline = Roofline(MISTRAL, A100)
    work = work_of((0, 512), decodes=8)
    assert RooflineTruth(roofline).time_ns(work) == pytest.approx(roofline.time_ns(work.load))


@pytest.mark.parametrize("work", [work_of(decodes=32), work_of((0, 512)), work_of((2000, 512), decodes=32)])
def test_generated_tables_tell_of_a_device_of_the_same_size_but_another_form(tables: TableTruth, work: Work) -> None:
    ratio = tables.time_ns(work) / Roofline(MISTRAL, A100).time_ns(work.load)
    assert 0.5 < ratio < 2
    assert abs(ratio - 1) > 0.001


def test_tokens_that_fill_a_tile_are_free_and_the_next_one_is_not(tables: TableTruth) -> None:
    # The longer prompt's attention and rows cost a little; a further tile of every matrix product costs much more.
    part, full, beyond = (tables.time_ns(work_of((0, tokens))) for tokens in (8 * TILE - 10, 8 * TILE, 8 * TILE + 1))
    assert full - part < 0.1 * (beyond - full)


def test_small_iterations_take_what_launching_takes(tables: TableTruth) -> None:
    one, two = (tables.time_ns(work_of(decodes=decodes, context=100)) for decodes in (1, 2))
    assert two - one < 0.01 * one


def test_a_later_chunk_of_a_prompt_takes_longer_than_the_first(tables: TableTruth) -> None:
    assert tables.time_ns(work_of((8000, 512))) > 1.05 * tables.time_ns(work_of((0, 512)))


def test_two_devices_take_more_than_half_as_long_as_one(tables: TableTruth) -> None:
    work = work_of((0, 2048))
    both = TableTruth(MISTRAL, A100, 2, None).time_ns(work)
    assert 0.5 * tables.time_ns(work) < both < 0.8 * tables.time_ns(work)


def test_tables_are_read_from_a_folder(tmp_path: Path, tables: TableTruth) -> None:
    """The same tables, but that every matrix product takes twice as long."""
    rows = list(generated_rows("gemm", A100))
    with (tmp_path / "aic_gemm_bf16_a100_vllm0.14.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows({**row, "latency_ms": str(2 * float(row["latency_ms"]))} for row in rows)
    work = work_of((0, 1024))
    slower = TableTruth(MISTRAL, A100, 1, tmp_path).time_ns(work)
    assert 1.5 * tables.time_ns(work) < slower < 2 * tables.time_ns(work)


def test_a_curve_goes_through_its_points_and_on_in_proportion() -> None:
    curve = Curve([(1, 10), (3, 20)])
    assert [curve.at(x) for x in (0, 1, 2, 3, 6)] == [10, 10, 15, 20, 40]


def test_noise_stays_within_its_bounds_and_averages_out() -> None:
    disturbance = Disturbance(random.Random(1), noise=0.2)
    factors = [disturbance.factor(0) for _ in range(2000)]
    assert 0.8 <= min(factors) < 0.81
    assert 1.19 < max(factors) <= 1.2
    assert sum(factors) / len(factors) == pytest.approx(1, abs=0.01)


def test_a_device_slows_down_at_its_moment_and_for_good() -> None:
    disturbance = Disturbance(random.Random(1), slowdown_at_ns=100, slowdown=1.3)
    assert [disturbance.factor(start_ns) for start_ns in (0, 99, 100, 10**12)] == [1, 1, 1.3, 1.3]
