"""How much can this machine take, under three targets, by each of three policies?

    python -m loadtest.experiments.capacity --out docs/results

Starts the CPU system once for each policy and target, and searches with `legato load capacity`. Takes about an hour
and a half with its defaults, and is resumed by the same command, with more targets if need be: what each search has
found lies in --work. Ends with one run of each policy at the rate that stall_free held under the middle target, for the
picture of the gaps.
"""

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.charts import Chart, Series
from loadtest.experiments.system import running
from loadtest.png import check_png, write_png

TOLD_POLICY = "stall_free"
"""The one that is told the target."""
POLICIES = (TOLD_POLICY, "prefill_first", "orca")
TBT_TARGETS_MS = (75.0, 150.0, 300.0)
TTFT_TARGET_MS = 5000.0
PROMPT_LEN = "lognormal:256:1024:2000"
OUTPUT_LEN = "lognormal:64:160:256"
FIRST_RATE = "0.5"
TIMEOUT_S = 4 * 3600.0
PRECISION_PERCENT = 10
"""How near the lowest rate that breaks is to the highest that holds when a search ends."""
MAX_LOAD = 0.7
"""Above this load average something else is running, and the figures would be of it as well."""
CDF_POINTS = 400
DEFAULT_WORK = Path(tempfile.gettempdir()) / "legato-capacity"


def main(argv: Sequence[str] | None = None) -> int:
    """Search, run, and write Markdown, JSON and pictures."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.experiments.capacity")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for the results")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="folder for searches, to resume from")
    parser.add_argument("--requests", type=int, default=60, help="measured in each probe")
    parser.add_argument("--repeats", type=int, default=3, help="searches for each figure")
    parser.add_argument("--targets-ms", type=float, nargs="+", default=TBT_TARGETS_MS, help="for P99 of TBT")
    parser.add_argument("--port", type=int, default=8670)
    parser.add_argument("--even-if-busy", action="store_true", help="run though the machine does something else")
    flags = parser.parse_args(argv)
    check_png()
    if os.getloadavg()[0] > MAX_LOAD and not flags.even_if_busy:
        print(f"the load average is {os.getloadavg()[0]}, above {MAX_LOAD}: not now", file=sys.stderr)
        return 2
    flags.work.mkdir(parents=True, exist_ok=True)
    flags.out.mkdir(parents=True, exist_ok=True)
    begun_s = time.monotonic()
    found = {
        policy: {f"{target_ms:g}": _search(flags, policy, target_ms) for target_ms in flags.targets_ms}
        for policy in POLICIES
    }
    middle_ms = flags.targets_ms[len(flags.targets_ms) // 2]
    rate_rps = found["stall_free"][f"{middle_ms:g}"]["rate_rps"]
    gaps_ms = {policy: _gaps(flags, policy, middle_ms, rate_rps) for policy in POLICIES} if rate_rps else {}
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
        "ttft_target_ms": TTFT_TARGET_MS,
        "lengths": {"prompt": PROMPT_LEN, "output": OUTPUT_LEN},
        "requests": flags.requests,
        "repeats": flags.repeats,
        "capacity": found,
    }
    (flags.out / "cpu-capacity.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    write_png(flags.out / "cpu-capacity.png", [_capacity_chart(found)])
    if gaps_ms:
        write_png(flags.out / "cpu-capacity-gaps.png", [_gaps_chart(gaps_ms, rate_rps)])
    text = _as_markdown(result, middle_ms, rate_rps, gaps_ms, (time.monotonic() - begun_s) / 60)
    (flags.out / "cpu-capacity.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _search(flags: argparse.Namespace, policy: str, target_ms: float) -> dict[str, float]:
    """The highest rate that this policy holds under this target, with its range."""
    if policy != TOLD_POLICY and (known := _judged_anew(flags, policy, target_ms)) is not None:
        return known
    book = flags.work / f"{policy}-{target_ms:g}.json"
    command = _tool("capacity", flags, target_ms, flags.requests)
    command += [
        "--rate",
        FIRST_RATE,
        "--repeats",
        str(flags.repeats),
        "--precision-percent",
        str(PRECISION_PERCENT),
        "--json",
        str(book),
    ]
    _run_beside(flags, policy, target_ms, command)
    capacity: dict[str, float] = json.loads(book.read_text())["capacity"]["a"]
    return capacity


def _judged_anew(flags: argparse.Namespace, policy: str, target_ms: float) -> dict[str, float] | None:
    """What the probes of a search under another target say of this one, if that is as much as a search would: a policy
    that is not told the target does the same under all of them."""
    for book in sorted(flags.work.glob(f"{policy}-*.json")):
        probes = json.loads(book.read_text())["probes"]
        rates = [
            _capacity_of([probe for probe in probes if probe["repeat"] == repeat], target_ms)
            for repeat in range(flags.repeats)
        ]
        known = [rate for rate in rates if rate is not None]
        if len(known) == flags.repeats:
            return {"rate_rps": statistics.median(known), "low_rps": min(known), "high_rps": max(known)}
    return None


def _capacity_of(probes: Sequence[dict[str, Any]], target_ms: float) -> float | None:
    """The highest rate that held, if one that broke is near above it and none that held is above that."""
    held, broke = [0.0], [math.inf]
    for probe in probes:
        holds = not probe["errors"] and probe["gap_ms"] <= target_ms and probe["ttft_ms"] <= TTFT_TARGET_MS
        (held if holds else broke).append(probe["rate_rps"])
    is_found = max(held) < min(broke) <= max(held) * (1 + PRECISION_PERCENT / 100)
    return max(held) if is_found else None


def _gaps(flags: argparse.Namespace, policy: str, target_ms: float, rate_rps: float) -> list[float]:
    """Every gap of one run at this rate, in order of length."""
    lines = flags.work / f"{policy}-gaps.jsonl"
    if not lines.exists():
        command = _tool("run", flags, target_ms, 2 * flags.requests)
        command += ["--rate", str(rate_rps), "--progress", "false", "--jsonl", str(lines)]
        _run_beside(flags, policy, target_ms, command)
    gaps_ms: list[float] = []
    for line in lines.read_text().splitlines():
        request = json.loads(line)
        chunks_ms = request["chunks_ms"]
        if request["measured"]:
            gaps_ms += [later - earlier for earlier, later in itertools.pairwise(chunks_ms)]
    return sorted(gaps_ms)


def _tool(command: str, flags: argparse.Namespace, target_ms: float, num_requests: int) -> list[str]:
    argv = [sys.executable, "-m", "loadtest", command, "--base-url", f"http://127.0.0.1:{flags.port}"]
    argv += ["--prompt-len", PROMPT_LEN, "--output-len", OUTPUT_LEN, "--requests", str(num_requests)]
    return [*argv, "--tbt-target-ms", f"{target_ms:g}", "--ttft-target-ms", f"{TTFT_TARGET_MS:g}", "--startup-s", "10"]


def _run_beside(flags: argparse.Namespace, policy: str, target_ms: float, command: list[str]) -> None:
    """Run a command of the load generator while a system of this policy and target serves.

    Raises:
        subprocess.CalledProcessError: If it could not be begun, or did not end well.
    """
    system_flags = ["--policy", policy, "--tbt-target-ms", f"{target_ms:g}"]
    fits = flags.work / f"fits-{policy}-{target_ms:g}"
    with running(flags.port, system_flags, {}, fits):
        status = subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode
    if status not in (0, 1):  # 1 is a run that is marked invalid; its gaps are shown all the same, and it has said so.
        raise subprocess.CalledProcessError(status, command)


def _capacity_chart(found: dict[str, Any]) -> Chart:
    return Chart(
        title="Capacity under a target for P99 TBT",
        x_label="target (ms)",
        y_label="requests per second",
        series=[
            Series(name=policy, points=[(float(target), one["rate_rps"]) for target, one in by_target.items()])
            for policy, by_target in found.items()
        ],
    )


def _gaps_chart(gaps_ms: dict[str, list[float]], rate_rps: float) -> Chart:
    return Chart(
        title=f"Gaps at {rate_rps:.2g} requests/s",
        x_label="gap (ms)",
        y_label="share of gaps at or below",
        is_x_log=True,
        series=[
            Series(name=policy, points=[(_at(gaps, i / CDF_POINTS), i / CDF_POINTS) for i in range(CDF_POINTS + 1)])
            for policy, gaps in gaps_ms.items()
            if gaps
        ],
    )


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _as_markdown(
    result: dict[str, Any], middle_ms: float, rate_rps: float, gaps_ms: dict[str, list[float]], minutes: float
) -> str:
    header = "| policy | " + " | ".join(f"TBT {target} ms" for target in result["capacity"]["stall_free"]) + " |"
    lines = [
        "# Capacity of this machine, by policy and target",
        "",
        f"{result['date']}; {result['machine']}; SmolLM2-135M-Instruct on the CPU; {minutes:.0f} minutes.",
        f"Prompts {PROMPT_LEN}, outputs {OUTPUT_LEN} (median, P90, longest), Poisson arrivals.",
        "",
        "```",
        f"python -m loadtest.experiments.capacity --requests {result['requests']} --repeats {result['repeats']}",
        "```",
        "",
        "The highest rate, in requests per second, at which P99 of TBT keeps the target and P99 of TTFT "
        f"{TTFT_TARGET_MS:g} ms: median of {result['repeats']} searches (least to greatest). Only `stall_free` is told "
        "the target; the others are searched anew only where the probes of an earlier search leave a target open.",
        "",
        header,
        "| --- " * (len(result["capacity"]["stall_free"]) + 1) + "|",
    ]
    for policy, by_target in result["capacity"].items():
        cells = [f"{one['rate_rps']:.2f} ({one['low_rps']:.2f} to {one['high_rps']:.2f})" for one in by_target.values()]
        lines.append(f"| `{policy}` | " + " | ".join(cells) + " |")
    lines += ["", "![Capacity](cpu-capacity.png)", ""]
    if gaps_ms:
        lines += [
            f"All three at {rate_rps:.2g} requests/s, which `stall_free` holds under {middle_ms:g} ms:",
            "",
            "| policy | gap P50 | P99 | P99.9 | max |",
            "| --- | --- | --- | --- | --- |",
        ]
        for policy, gaps in gaps_ms.items():
            quantiles = [_at(gaps, share) for share in (0.5, 0.99, 0.999, 1.0)] if gaps else []
            lines.append(f"| `{policy}` | " + " | ".join(f"{value:.0f}" for value in quantiles) + " |")
        lines += ["", "![Gaps](cpu-capacity-gaps.png)", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
