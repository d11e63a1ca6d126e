"""What a comparison calls a change."""

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from common.clock import NS_PER_MS, NS_PER_S
from loadtest.cli import main
from loadtest.compare import compare, has_regression
from loadtest.drive import Outcome
from loadtest.records import RequestRecord
from loadtest.summary import report_of
from loadtest.workload import RequestClass, pairs_of

CLASSES = (RequestClass(name="default", lengths=pairs_of("1", "1")),)


def run_of(mean_gap_ms: float, seed: int, num_requests: int = 120) -> dict[str, Any]:
    """A report of a run whose gaps spread by a tenth around a mean."""
    rng = random.Random(seed)
    records = []
    for index in range(num_requests):
        begin_ns = index * 10 * NS_PER_MS
        times, at_ns = array("q"), begin_ns + 50.0 * NS_PER_MS
        for _ in range(20):
            times.append(round(at_ns))
            at_ns += rng.gauss(mean_gap_ms, mean_gap_ms / 10) * NS_PER_MS
        records.append(
            RequestRecord(
                index=index,
                class_name="default",
                scheduled_ns=begin_ns,
                started_ns=begin_ns,
                sent_ns=begin_ns,
                ended_ns=times[-1],
                chunk_ns=times,
                num_output_tokens=20,
            )
        )
    outcome = Outcome(start_ns=0, window_start_ns=0, window_end_ns=NS_PER_S, records=records)
    return report_of(outcome, CLASSES, {})


def written(tmp_path: Path, **reports: dict[str, Any]) -> list[str]:
    paths = []
    for name, found in reports.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(found))
        paths.append(str(path))
    return paths


def test_two_runs_of_one_server_show_no_regression(tmp_path: Path) -> None:
    assert main(["compare", *written(tmp_path, a=run_of(50, 1), b=run_of(50, 2))]) == 0


def test_a_server_a_fifth_slower_is_worse_and_the_other_way_round_better(tmp_path: Path) -> None:
    slow, fast = run_of(60, 1), run_of(50, 2)
    paths = written(tmp_path, fast=fast, slow=slow)

    assert main(["compare", *paths]) == 1
    assert main(["compare", *reversed(paths)]) == 0
    verdicts = {d.figure: d.verdict for d in compare(slow, fast, tolerance_percent=5)}
    assert verdicts["tbt_ms p50"] == verdicts["tpot_ms p50"] == "better"


def test_a_change_within_the_tolerance_is_none() -> None:
    differences = compare(run_of(50, 1), run_of(51, 2), tolerance_percent=5)

    assert not has_regression(differences)
    assert {d.verdict for d in differences if d.figure == "tbt_ms p50"} == {"same"}


def test_too_few_requests_to_tell_are_unclear_not_worse() -> None:
    differences = compare(run_of(50, 1, num_requests=3), run_of(53, 4, num_requests=3), tolerance_percent=5)

    assert not has_regression(differences)
    assert any(d.verdict == "unclear" for d in differences)


def test_without_intervals_a_change_is_told_but_not_judged() -> None:
    a, b = run_of(50, 1, num_requests=1), run_of(80, 2, num_requests=1)
    differences = compare(a, b, tolerance_percent=5)

    assert {d.verdict for d in differences if d.figure == "tbt_ms p50"} == {"changed"}
    assert not has_regression(differences)


def test_more_errors_are_a_regression(tmp_path: Path) -> None:
    a, b = run_of(50, 1), run_of(50, 2)
    b["errors"] = 10

    assert main(["compare", *written(tmp_path, a=a, b=b)]) == 1


def test_the_differences_are_written_for_machines(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    main(["compare", *written(tmp_path, a=run_of(50, 1), b=run_of(60, 2)), "--json", str(out)])
    found = json.loads(out.read_text())

    assert found["regression"] is True
    entry = found["differences"]["tbt_ms p50"]
    assert entry["ci95"][0] <= entry["difference"] <= entry["ci95"][1]
    assert entry["verdict"] == "worse"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"requests": 3, "ttft_ms": {}}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (good,) = written(tmp_path, a=run_of(50, 1))
    bad = tmp_path / "bad.json"
    bad.write_text(text)

    assert main(["compare", good, str(bad)]) == 2
    assert "bad.json" in capsys.readouterr().err


def test_an_invalid_run_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_of(50, 1), run_of(50, 2)
    b["valid"], b["detail"]["invalid_because"] = False, ["interrupted"]

    assert main(["compare", *written(tmp_path, a=a, b=b)]) == 2
    assert "interrupted" in capsys.readouterr().err
