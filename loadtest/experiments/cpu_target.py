"""Does the target hold on the real CPU system? `python -m loadtest.experiments.cpu_target`.

Measures the median gap of four lone streams, sets the target to twice that, then lets the four decode while prompts of
1,500 tokens keep coming: once under `stall_free`, once under `prefill_first`, in one run. Reports the share of gaps
above the target, overall and while a prompt was being read. Writes Markdown, and JSON beside it.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
LONE_TARGET_MS = 1000.0
"""Target while the lone streams are measured; loose, and without effect, since no prompt comes."""
TARGET_FACTOR = 2.0
STREAMS = 4


@contextlib.contextmanager
def legato(policy: str, target_ms: float, flags: list[str], fits: str) -> Iterator[str]:
    """Run the whole system; its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "services.launcher.cli", "up", "--port", str(port), "--policy", policy]
    command += ["--tbt-target-ms", str(target_ms), "--log-level", "warning", *flags]
    process = subprocess.Popen(command, env={**os.environ, "LEGATO_FITS": fits}, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)


def stall(url: str, target_ms: float, *, before_s: float, injections: int, every_s: float, prompt_len: int) -> Any:
    """One run of `legato load stall`; its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "stall.json"
        flags = {
            "--base-url": url,
            "--tbt-target-ms": target_ms,
            "--streams": STREAMS,
            "--output-len": 400,
            "--inject-prompt-len": prompt_len,
            "--injections": injections,
            "--every-s": every_s,
            "--before-s": before_s,
            "--after-s": 3,
            "--json": result,
        }
        argv = [str(part) for pair in flags.items() for part in pair]
        subprocess.run([sys.executable, "-m", "loadtest", "stall", *argv], check=False, stdout=subprocess.DEVNULL)
        return json.loads(result.read_text())


def share(report: Any, phases: tuple[str, ...]) -> float:
    """Of the gaps in these phases, the part above the target."""
    num_gaps = sum(report["gaps"][phase] for phase in phases)
    num_late = sum(report["stalls"][phase] for phase in phases)
    return float(num_late / max(1, num_gaps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=15)
    parser.add_argument("--every-s", type=float, default=6.0)
    parser.add_argument("--prompt-len", type=int, default=1500)
    parser.add_argument("--policies", nargs="+", default=["stall_free", "prefill_first"])
    parser.add_argument("--output", type=Path, default=Path("docs/results/cpu-target.md"))
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags for `legato up`, last")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as fits:
        with legato("stall_free", LONE_TARGET_MS, options.flags, fits) as url:
            lone = stall(url, LONE_TARGET_MS, before_s=15, injections=1, every_s=1, prompt_len=1)
        lone_ms = lone["gap_ms"]["before"]["p50"]
        target_ms = round(TARGET_FACTOR * lone_ms, 1)
        print(f"lone streams: median gap {lone_ms:.1f} ms; target {target_ms:.1f} ms", flush=True)
        for policy in options.policies:
            with legato(policy, target_ms, options.flags, fits) as url:
                rows[policy] = stall(
                    url,
                    target_ms,
                    before_s=5,
                    injections=options.injections,
                    every_s=options.every_s,
                    prompt_len=options.prompt_len,
                )
            print(_row(policy, rows[policy]), flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(_document(rows, lone_ms, target_ms, options))
    content = {"lone_median_gap_ms": lone_ms, "target_ms": target_ms, "policies": rows}
    options.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


def _row(policy: str, report: Any) -> str:
    during = report["gap_ms"]["during"]
    return (
        f"| {policy} | {100 * share(report, ('before', 'during', 'between', 'after')):.2f} % "
        f"| {100 * share(report, ('during',)):.2f} % | {during['p50']:.0f} / {during['p99']:.0f} / {during['max']:.0f} "
        f"| {report['injected_ttft_ms']['p50'] / 1000:.1f} | {report['gaps']['during']} | {report['errors']} |"
    )


def _document(rows: dict[str, Any], lone_ms: float, target_ms: float, options: argparse.Namespace) -> str:
    lines = [
        "# The target on the real CPU system",
        "",
        f"{datetime.date.today()}, {cpu_name()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}. "
        "SmolLM2-135M-Instruct through `legato up`, generator on the same machine.",
        "",
        "```",
        f"python -m loadtest.experiments.cpu_target --injections {options.injections} --every-s {options.every_s}"
        + (f" --flags {' '.join(options.flags)}" if options.flags else ""),
        "```",
        "",
        f"{STREAMS} lone streams have a median gap of {lone_ms:.1f} ms; the target is twice that, {target_ms:.1f} ms. "
        f"Then the {STREAMS} go on while a prompt of {options.prompt_len} tokens comes every {options.every_s:g} s.",
        "",
        "| policy | gaps above target | while a prompt is read | gaps then: P50 / P99 / max ms | prompts' TTFT s "
        "| gaps then | errors |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_row(policy, report) for policy, report in rows.items()),
    ]
    invalid = {policy: report["detail"]["invalid_because"] for policy, report in rows.items() if not report["valid"]}
    if invalid:
        lines += ["", f"The generator calls these runs invalid: {invalid}"]
    return "\n".join(lines) + "\n"


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health/ready", timeout=2) as response:
            if response.status == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"{url} was not ready within {READY_TIMEOUT_S:g} s")


if __name__ == "__main__":
    main()
