"""The command line of the simulator."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.cost.fit import Fit
from common.cost.shapes import SHAPES
from loadtest.simulate.cli import main
from loadtest.simulate.setup import shape_of
from services.scheduler.fits import FitFile

SMALL = ["--workload", "azure_2023_code", "--requests", "12", "--rate", "4"]
DISTRIBUTIONS = ("ttft_ms", "tbt_ms", "max_gap_ms", "scheduling_delay_ms")


def json_of(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "out.json"
    assert main([*SMALL, *arguments, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_run_prints_a_table_and_writes_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(tmp_path, "--seed", "3")
    for name in DISTRIBUTIONS:
        assert list(found[name]) == ["p50", "p90", "p99", "p999", "max"]
        assert 0 <= found[name]["p50"] <= found[name]["max"]
    assert found["seed"] == 3
    assert found["requests"] == {"arrived": 12, "finished": 12, "rejected": 0}
    assert found["throughput_tok_s"] > 0
    assert {"stalls", "preemptions"} <= found.keys()
    printed = capsys.readouterr().out
    for words in ("TTFT", "TBT", "max gap", "scheduling delay", "stalls", "throughput", "preemptions", "KV cache"):
        assert words in printed


def test_several_seeds_are_reported_together_and_one_by_one(tmp_path: Path) -> None:
    found = json_of(tmp_path, "--seed", "1,2")
    assert found["seed"] == [1, 2]
    assert found["requests"]["finished"] == 24
    assert [run["seed"] for run in found["runs"]] == [1, 2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "h200", "--model", "llama2-70b", "--tp", "4", "--pp", "2"],
        ["--device", "h100", "--model", "falcon-180b", "--tp", "8"],
        ["--device", "a100-80", "--model", "yi-34b", "--tp", "2", "--policy", "prefill_first"],
        ["--truth", "tables", "--noise", "0.2", "--slowdown-at", "1", "--slowdown", "1.3"],
        ["--token-budget", "512", "--workers", "2", "--arrivals", "bursty"],
        ["--device", "cpu", "--kv-tokens", "20000", "--queue-timeout-s", "9999", "--tbt-target-ms", "5000"],
    ],
)
def test_every_kind_of_system_can_be_simulated(tmp_path: Path, arguments: list[str]) -> None:
    assert json_of(tmp_path, *arguments)["requests"]["finished"] == 12


def test_a_model_comes_from_a_hugging_face_configuration(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "torch_dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert shape_of(str(path)) == SHAPES["mistral-7b"]
    assert json_of(tmp_path, "--model", str(path)) == json_of(tmp_path, "--model", "mistral-7b")


def test_a_device_comes_from_the_fit_that_a_scheduler_saved(tmp_path: Path) -> None:
    fit = Fit()
    fit.factors = [2.0] * len(fit.factors)
    saved = FitFile(
        device="a GPU",
        device_kind="a100-80",
        dtype="bfloat16",
        attention="none",
        tensor_parallel=1,
        shape=SHAPES["mistral-7b"],
        fit=fit.save(),
    )
    path = tmp_path / "fit.json"
    path.write_bytes(msgspec.json.encode(saved))
    slow, fast = (json_of(tmp_path, "--device", device, "--noise", "0") for device in (str(path), "a100-80"))
    assert slow["tbt_ms"]["p50"] > 1.5 * fast["tbt_ms"]["p50"]
    assert slow["prediction_error"] < 0.02, "the scheduler starts from the same fit"


def test_the_log_of_a_run_names_every_event(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    assert main([*SMALL, "--log", str(path)]) == 0
    lines = path.read_text().splitlines()
    assert sum("> RequestArrived" in line for line in lines) == 12
    assert sum("< RequestFinished" in line for line in lines) == 12


def test_capacity_prints_a_rate_with_its_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "capacity.json"
    arguments = [*SMALL, "--seed", "0,1", "--precision-percent", "50", "--processes", "1", "--most-rate", "8"]
    assert main(["capacity", *arguments, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert 0 < found["low_rps"] <= found["rate_rps"] <= found["high_rps"] <= 8
    assert "requests/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "abacus"], "--device is 'abacus'"),
        (["--model", "gpt-0"], "--model is 'gpt-0'"),
        (["--model", "falcon-180b"], "raise --tp or --pp"),
        (["--policy", "random"], "--policy is 'random'"),
        (["--workload", "nothing.csv"], "nothing.csv"),
        (["--rate", "-1"], "--rate is -1"),
        (["--requests", "many"], "--requests"),
        (["--seed", "1,1"], "--seed"),
        (["--seed", "1,2", "--log", "log.txt"], "--log takes one seed"),
        (["--noise", "1.5"], "--noise is 1.5"),
        (["--workload", "sharegpt", "--arrivals", "trace"], "no arrivals"),
        (["--traces", "nowhere"], "--traces is nowhere; there is no such folder"),
        (["--profiles", "nowhere"], "--profiles is nowhere; there is no such folder"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
