"""The search for a capacity."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.cli import main
from loadtest.search import Bounds, Probe, bracket, capacity_of, next_rate
from tests.loadtest.fake_server import FakeServer, Script
from tests.loadtest.worlds import read, server_beside

BOUNDS = Bounds(least_rps=0.1, most_rps=1000.0, precision=0.05)


def search(truth_rps: float, first_rps: float, noise: float = 0.0, seed: int = 0) -> list[Probe]:
    rng, probes = random.Random(seed), list[Probe]()
    while (rate_rps := next_rate(probes, first_rps, BOUNDS)) is not None:
        probes.append(Probe(rate_rps=rate_rps, holds=rate_rps <= truth_rps * (1 + noise * rng.gauss(0, 1))))
        assert len(probes) < 60
    return probes


@given(truth_rps=st.floats(0.2, 900), first_rps=st.floats(0.01, 5000))
def test_the_search_ends_in_a_bracket_around_the_truth(truth_rps: float, first_rps: float) -> None:
    held, broken = bracket(search(truth_rps, first_rps))

    assert held is not None
    assert broken is not None
    assert held <= truth_rps < broken <= held * 1.05
    assert BOUNDS.least_rps <= held


def test_a_server_that_never_breaks_is_tried_up_to_the_highest_rate() -> None:
    assert bracket(search(1e9, 1.0)) == (1000.0, None)


def test_a_server_that_never_holds_has_no_capacity() -> None:
    probes = search(0.0, 10.0)

    assert min(probe.rate_rps for probe in probes) == BOUNDS.least_rps
    found = capacity_of([probes])
    assert found is not None
    assert found.rate_rps == 0.0


@given(seed=st.integers(0, 200))
def test_a_noisy_server_ends_the_search_all_the_same(seed: int) -> None:
    found = capacity_of([search(20.0, 5.0, noise=0.1, seed=seed + 1000 * repeat) for repeat in range(5)])

    assert found is not None
    assert 10 <= found.low_rps <= found.rate_rps <= found.high_rps <= 30
    assert found.coverage == 1 - 1 / 16


def test_where_a_higher_rate_held_than_one_that_broke_the_lower_counts() -> None:
    probes = [Probe(rate_rps=4, holds=True), Probe(rate_rps=8, holds=False), Probe(rate_rps=9, holds=True)]

    assert bracket(probes) == (4, 8)


def one_at_a_time(service_s: float) -> FakeServer:
    """A server whose capacity is known: it answers one request after another."""
    lock = asyncio.Lock()

    class Serial(FakeServer):
        async def _complete(self, request: Any) -> Any:
            async with lock:
                await asyncio.sleep(service_s)
                return await super()._complete(request)

    return Serial()


FLAGS = [
    *("--arrivals", "constant", "--rate", "20", "--requests", "8", "--prompt-len", "20", "--output-len", "2"),
    *("--startup-s", "0", "--drain-s", "0", "--ttft-target-ms", "400", "--tbt-target-ms", "5000"),
    *("--precision-percent", "60", "--repeats", "2", "--quantile", "max"),
]


def test_a_search_compares_two_servers_by_turns_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_SEND_LAG_P99_MS", "MAX_LOOP_LAG_P99_MS", "MAX_LOOP_LAG_MS"):
        monkeypatch.setattr(f"loadtest.summary.{limit}", 60_000.0)  # A run that was late finds the same here.
    file = tmp_path / "capacity.json"
    with server_beside(server=one_at_a_time(0.12)) as slow, server_beside(lambda body: Script()) as fast:
        slow.has_tokenize = fast.has_tokenize = False  # What it would tell is of no interest here.
        urls = ["--base-url", slow.url, "--versus", fast.url, "--most-rate", "60", "--json", str(file)]
        assert main(["capacity", *FLAGS, *urls]) == 0
        found = read(file)
        num_seen = len(slow.seen)
        turns = [probe["server"] for probe in found["probes"]]

        # Nothing is left to do: the same command asks the servers nothing.
        assert main(["capacity", *FLAGS, *urls]) == 0
        assert len(slow.seen) == num_seen

        # A search that lost its last probes makes them again, and no others.
        kept = found | {"probes": found["probes"][:-2]}
        file.write_text(json.dumps(kept))
        assert main(["capacity", *FLAGS, *urls]) == 0
        assert read(file)["probes"][: len(kept["probes"])] == kept["probes"]

    assert turns[:4] == ["a", "b", "a", "b"]
    assert found["capacity"]["a"]["rate_rps"] < found["capacity"]["b"]["rate_rps"]


def test_a_file_of_another_search_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "capacity.json"
    file.write_text('{"probes": [], "question": {"seed": 99}}')

    assert main(["capacity", *FLAGS, "--json", str(file)]) == 2
    assert "other options" in capsys.readouterr().err
    assert "99" in file.read_text()


def test_a_closed_loop_has_no_capacity_to_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "--arrivals", "closed"]) == 2
    assert "closed" in capsys.readouterr().err
