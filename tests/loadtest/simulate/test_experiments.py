"""The experiments, far too small to show anything: that they run, and write what they found."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.simulate.experiments import law
from loadtest.simulate.experiments.__main__ import main
from loadtest.simulate.experiments.shared import Lab
from loadtest.simulate.options import SimulateOptions


def found_of(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    assert main([name, "--out", str(folder), "--seeds", "1", "--requests", "3", *arguments]) in (0, 1)
    assert (folder / f"{name}.md").read_text().startswith("# ")
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_the_ablation_has_every_policy_on_every_workload(tmp_path: Path) -> None:
    rows = found_of("ablation", tmp_path)["rows"]
    assert {(row["workload"], row["policy"]) for row in rows} == {
        (workload, policy)
        for workload in ("sharegpt", "arxiv")
        for policy in ("hybrid_only", "chunked_only", "stall_free")
    }


def test_the_late_share_is_reported_for_every_seed(tmp_path: Path) -> None:
    rows = found_of("late-share", tmp_path)["rows"]
    assert all(row["gaps"] > 0 for row in rows)


def test_a_folder_of_data_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["law", "--data", str(tmp_path / "absent")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_a_search_on_the_grid_ends_between_a_rate_that_holds_and_one_that_does_not() -> None:
    options = SimulateOptions(
        workload="azure_2023_code", requests=40, max_running=2, max_waiting=1000, queue_timeout_s=600.0
    )
    found = set()
    for first in (20, 60):
        searches = law.Searches(options, 0, ())
        found.add(searches.capacity(0, first))
        (step,) = {step for step, outcome in searches.seen.items() if law.CRITERION.holds(outcome)} & found
        assert not law.CRITERION.holds(searches.seen[step + 1])


def test_systems_under_study_never_refuse() -> None:
    options = Lab(data=None).options(rate=1.0)
    assert options.max_waiting >= 100_000
    assert options.queue_timeout_s >= 3600
