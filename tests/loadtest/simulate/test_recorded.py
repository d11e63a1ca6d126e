"""A device from a recording: what its fit and its scatter are, and that the simulator runs on it."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.cost.devices import DEVICES
from common.cost.load import Load
from common.cost.roofline import Roofline, Terms
from common.cost.shapes import SHAPES
from loadtest.simulate import recorded
from loadtest.simulate.cli import main as simulate
from loadtest.simulate.recorded import LEAST_ITERATIONS, device_of, fit_all
from loadtest.simulate.truth import Disturbance
from services.scheduler.recording.segment import BadRecording
from tests.services.scheduler.recording.recorded import busy, recorded_world

ROOFLINE = Roofline(SHAPES["smollm2"], DEVICES["cpu"])


def iterations(rng: random.Random, number: int) -> list[Terms]:
    """Terms of hybrid batches of all sorts."""
    rows = []
    for _ in range(number):
        load = Load()
        if num_decodes := rng.randrange(0, 9):
            load.add_decodes(num_decodes, num_decodes * rng.randrange(10, 900))
        if rng.random() < 0.5 or not num_decodes:
            load.add_chunk(rng.randrange(0, 800), rng.randrange(1, 300), is_sampled=rng.random() < 0.3)
        rows.append(ROOFLINE.terms(load))
    return rows


def test_a_device_that_is_slower_in_one_term_is_found_in_spite_of_noise_and_outliers() -> None:
    rng = random.Random(7)
    terms = np.array(iterations(rng, 3000))
    truth = np.array([1.5, 1.2, 1.0, 1.6, 0.9, 1.1])
    noise = np.array([rng.uniform(0.9, 1.1) for _ in terms])
    noise[::50] = 4.0  # the machine did something else
    fit, ratio = fit_all(terms, (terms @ truth) * noise)
    predicted, real = terms @ np.array(fit.factors), terms @ truth
    assert np.max(np.abs(predicted / real - 1)) < 0.05
    assert fit.num_measured == len(ratio) == 3000
    assert np.median(ratio) == pytest.approx(1, abs=0.03)
    assert fit.error == pytest.approx(np.mean(np.abs(ratio - 1)))


def test_an_iteration_in_which_the_machine_slept_is_left_out() -> None:
    terms = np.array(iterations(random.Random(3), 400))
    took_ns = terms.sum(axis=1)
    took_ns[7] *= 1000
    fit, ratio = fit_all(terms, took_ns)
    assert fit.num_measured == len(ratio) == 399
    assert max(ratio) < 1.05


def test_simulated_iterations_scatter_as_measured_ones_spell_by_spell() -> None:
    measured = (0.5, 1.0, 1.0, 3.0, 3.0)
    first = set()
    for seed in range(40):
        disturbance = Disturbance(random.Random(seed), scatter=measured)
        drawn = tuple(disturbance.factor(0) for _ in range(5))
        assert drawn in {measured[begin:] + measured[:begin] for begin in range(5)}
        assert tuple(disturbance.factor(0) for _ in range(5)) == drawn
        first.add(drawn)
    assert len(first) == 5, "seeds begin at different places"


def test_a_recording_becomes_a_device_that_the_simulator_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, recorder = recorded_world(tmp_path / "recording", num_blocks=64)
    rng = random.Random(5)
    for index in range(LEAST_ITERATIONS + 20):
        if index % 8 == 0:
            world.arrive(f"request-{index}", prompt_len=10, max_tokens=12)
        world.finish_iteration(took_ns=rng.randrange(10_000_000, 20_000_000))
    recorder.close()
    device = tmp_path / "device.json"
    assert recorded.main([str(tmp_path / "recording"), "--out", str(device)]) == 0
    assert "iterations" in capsys.readouterr().out
    saved = device_of(tmp_path / "recording")
    assert len(saved.scatter) == saved.fit.num_measured
    assert float(np.mean(np.abs(np.array(saved.scatter) - 1))) == pytest.approx(saved.fit.error, abs=1e-3)
    assert list(saved.scatter) != sorted(saved.scatter), "in the order in which they were measured"
    report = tmp_path / "report.json"
    flags = ["--device", str(device), "--requests", "20", "--rate", "2", "--kv-tokens", "20000", "--json", str(report)]
    assert simulate([*flags, "--workload", "sharegpt"]) == 0
    told = msgspec.json.decode(report.read_bytes())["requests"]
    assert told["finished"] + told["rejected"] == told["arrived"] == 20
    assert told["finished"] >= 10


def test_what_says_too_little_is_refused(tmp_path: Path) -> None:
    world, recorder = recorded_world(tmp_path)
    busy(world, num_requests=1)
    recorder.close()
    with pytest.raises(BadRecording, match="iterations are too few"):
        device_of(tmp_path)
    assert recorded.main([str(tmp_path), "--out", str(tmp_path / "device.json")]) == 2
    assert recorded.main([str(tmp_path / "nothing"), "--out", str(tmp_path / "device.json")]) == 2
