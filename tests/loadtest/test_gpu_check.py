"""`legato gpu-check` on the CPU: the same script, tiny."""

import argparse
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gpu_worker.cuda.device import HostDevice, HostGraph
from loadtest.gpu_check.check import Check
from loadtest.gpu_check.needs import advice, missing
from loadtest.gpu_check.stages import Deadline, Failed, Report, Skipped, run_stage

TIMEOUT_S = 540
pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)

STAGES = [
    *("probe", "kernels", "engine", "graphs", "deterministic"),
    *("decode", "prefill", "hybrid", "stall", "host", "fit", "ranks"),
]
BARE = """
import sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Bare())
import torch
torch.set_num_threads(1)
from loadtest.gpu_check.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
ABSENT = ("zmq", "prometheus_client", "opentelemetry", "uvloop", "aiohttp", "tokenizers", "safetensors", "gguf")
"""What a machine that has a GPU and little else need not bring."""


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """One run, on a machine as bare as may be."""
    flags = ("--device", "cpu", "--tiny", "--budget-s", str(TIMEOUT_S - 30))
    done = subprocess.run(
        [sys.executable, "-c", BARE.format(forbidden=ABSENT), *flags],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_stage_passes_on_the_cpu(lines: list[dict[str, Any]]) -> None:
    assert [(line["stage"], line["status"]) for line in lines] == [(name, "passed") for name in [*STAGES, "all"]]


def test_each_back_end_is_checked_or_says_why_not(lines: list[dict[str, Any]]) -> None:
    attention = lines[STAGES.index("kernels")]["attention"]
    assert "runs on CUDA devices" in attention["fa3"]["skipped"]
    assert "runs on CUDA devices" in attention["fa2"]["skipped"]
    assert attention["torch"]["cases"] > 0
    pytest.importorskip("triton")
    assert attention["triton"]["cases"] > 0


def test_graphs_are_what_the_second_look_at_the_engine_is_about(lines: list[dict[str, Any]]) -> None:
    assert "decodes out of a graph" not in lines[STAGES.index("engine")]["errors"]
    graphs = lines[STAGES.index("graphs")]
    assert graphs["errors"]["decodes out of a graph"] < 1e-3
    assert graphs["clear_best_tokens"] > 0


def test_the_stall_test_runs_the_schedulers_own_core_under_each_policy(lines: list[dict[str, Any]]) -> None:
    stall = lines[STAGES.index("stall")]
    for name in ("derived", "budget 512", "prefill_first"):
        assert stall[name]["max_gap_ms"] >= stall[name]["p99_gap_ms"] > 0
        assert stall[name]["num_gaps"] > 0
        assert stall[name]["prompt_ttft_ms"] > 0


class HoardingDevice(HostDevice):
    """Holds what was freed until a capture or an explicit word gives it back, as torch's allocator on CUDA does."""

    num_held = 1 << 29

    def free_bytes(self) -> tuple[int, int]:
        free, total = super().free_bytes()
        return free - self.num_held, total

    def reset_peak(self) -> None:
        self.num_held = 0

    def capture(self, run: Callable[[], Tensor], buffers: Callable[[], Sequence[Tensor]]) -> HostGraph:
        self.num_held = 0
        return super().capture(run, buffers)


def test_what_other_stages_have_freed_is_not_counted_as_what_graphs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.gpu_check.check.open_device", lambda kind: HoardingDevice())
    detail: dict[str, Any] = {}
    options = argparse.Namespace(device="cpu", tiny=True, attention_backend="auto")
    Check(options).graphs(Deadline(60.0), detail)
    assert detail["mib"] == 0


def test_ranks_are_not_tried_beyond_the_stages_time() -> None:
    detail: dict[str, Any] = {}
    Check(argparse.Namespace(device="cpu", tiny=True)).ranks(Deadline(0.0), detail)
    assert detail == {
        "collectives": "ok",
        "tp 2, pp 1": "no time left",
        "tp 1, pp 2": "no time left",
        "tp 2, pp 2": "skipped: there are 2 devices",
    }


def test_what_is_missing_is_named_with_the_wheels_to_bring() -> None:
    assert missing("cpu") == []
    text = advice(["msgspec", "structlog"])
    assert "not installed here: msgspec, structlog" in text
    assert "pip download" in text
    assert "--find-links wheels msgspec structlog" in text


def test_a_bare_python_is_told_at_once() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(Path.cwd())!r}); "
            "from loadtest.gpu_check.__main__ import main; sys.exit(main(['--device', 'cuda']))",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "not installed here: torch, numpy, msgspec, structlog, triton" in done.stderr


def report_of(run: Any, *, seconds: float = 60.0, left: float = 60.0) -> dict[str, Any]:
    report = Report(io.StringIO())
    run_stage(report, "stage", seconds, run, budget_end=time.monotonic() + left)
    assert json.loads(report.output.getvalue()) == report.lines[0]  # type: ignore[attr-defined]  # A StringIO.
    return report.lines[0]


def test_a_stage_reports_whatever_becomes_of_it() -> None:
    def fails(deadline: Deadline, detail: dict[str, Any]) -> None:
        detail["worst"] = 0.3
        raise Failed("too slow")

    def breaks(deadline: Deadline, detail: dict[str, Any]) -> None:
        raise RuntimeError("no kernel image")

    def skips(deadline: Deadline, detail: dict[str, Any]) -> None:
        raise Skipped("no such build")

    assert report_of(fails) | {"seconds": 0} == {
        "stage": "stage",
        "status": "failed",
        "why": "too slow",
        "worst": 0.3,
        "seconds": 0,
    }
    assert report_of(breaks)["why"] == "RuntimeError: no kernel image"
    assert report_of(skips)["status"] == "skipped"
    assert report_of(breaks, left=-1.0)["status"] == "skipped"


def test_a_stage_that_hangs_ends_the_process_with_its_line_in_the_file_too(tmp_path: Path) -> None:
    script = (
        "import sys, threading; from loadtest.gpu_check import stages; stages.GRACE_S = 0.1; "
        "report = stages.Report(sys.stdout, open(sys.argv[1], 'w')); "
        "stages.run_stage(report, 'hangs', 0.1, lambda d, r: threading.Event().wait(60), 1e18)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "lines")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3
    assert json.loads(done.stdout)["status"] == "hung"
    assert (tmp_path / "lines").read_text() == done.stdout
