"""`legato load compare A.json B.json`: what changed between two runs, and is it more than chance?

Each figure's difference comes with a 95% confidence interval. A change is *worse* only where the whole interval lies
beyond the tolerance, so that a noisy CI machine does not cry wolf; it is *unclear* where the interval holds both.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loadtest.stats import QUANTILES, Interval, difference_interval
from loadtest.summary import METRICS

Verdict = Literal["same", "better", "worse", "unclear", "changed"]

DEFAULT_TOLERANCE_PERCENT = 5.0
DEFAULT_TOLERANCE_MS = 1.0
"""What the generator itself is good to."""
GATING = ("p50", "p90", "p99")
"""Figures that decide the exit status. P99.9 and the maximum of a CI-sized run rest on a handful of gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure of two runs. Lower is better."""

    figure: str
    a: float
    b: float
    interval: Interval | None  # of b - a; absent where a run gave no interval
    verdict: Verdict


def main(argv: Sequence[str]) -> int:
    """Compare; 0 if nothing is worse, 1 if something is, 2 if the reports cannot be compared."""
    parser = argparse.ArgumentParser(prog="legato load compare", description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("a", type=Path, metavar="A.json", help="report of the run before")
    parser.add_argument("b", type=Path, metavar="B.json", help="report of the run after")
    parser.add_argument(
        "--tolerance-percent",
        type=float,
        default=DEFAULT_TOLERANCE_PERCENT,
        metavar="X",
        help=f"changes up to this are none (default: {DEFAULT_TOLERANCE_PERCENT:g})",
    )
    parser.add_argument(
        "--tolerance-ms",
        type=float,
        default=DEFAULT_TOLERANCE_MS,
        metavar="X",
        help=f"nor are changes up to this (default: {DEFAULT_TOLERANCE_MS:g})",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the differences here")
    options = parser.parse_args(argv)
    try:
        reports = [read_report(options.a), read_report(options.b)]
    except ValueError as error:
        print(f"legato load compare: {error}", file=sys.stderr)
        return 2
    differences = compare(reports[0], reports[1], options.tolerance_percent, options.tolerance_ms)
    if options.json is not None:
        options.json.write_text(json.dumps(_as_json(differences), indent=2) + "\n", encoding="utf-8")
    print(_as_text(differences, reports))
    return 1 if has_regression(differences) or more_errors(reports[0], reports[1]) else 0


def read_report(path: Path) -> dict[str, Any]:
    """Return a valid run's report.

    Raises:
        ValueError: If the file is no report of `legato load run`, or of an invalid run, which proves nothing.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        is_report = all(set(QUANTILES) <= set(found[metric]) for metric in METRICS) and "requests" in found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no report of `legato load run`: {error!r}") from error
    if not is_report:
        raise ValueError(f"{path} is no report of `legato load run`")
    if not found["valid"]:
        reasons = "; ".join(found.get("detail", {}).get("invalid_because", [])) or "no reason given"
        raise ValueError(f"{path} is of an invalid run ({reasons})")
    return dict(found)


def compare(
    a: dict[str, Any], b: dict[str, Any], tolerance_percent: float, tolerance_ms: float = 0.0
) -> list[Difference]:
    """Return the difference of every quantile of every metric that both reports have."""
    found = []
    for metric in METRICS:
        for quantile in QUANTILES:
            a_value, b_value = a[metric][quantile], b[metric][quantile]
            if a_value is None or b_value is None:
                continue
            a_interval, b_interval = _interval(a, metric, quantile), _interval(b, metric, quantile)
            interval = None
            if a_interval is not None and b_interval is not None:
                interval = difference_interval(a_value, a_interval, b_value, b_interval)
            tolerance = max(tolerance_ms, abs(a_value) * tolerance_percent / 100)
            found.append(
                Difference(
                    figure=f"{metric} {quantile}",
                    a=a_value,
                    b=b_value,
                    interval=interval,
                    verdict=_verdict(b_value - a_value, interval, tolerance),
                )
            )
    return found


def has_regression(differences: Sequence[Difference]) -> bool:
    """Whether a figure that gates is worse."""
    return any(d.verdict == "worse" and d.figure.rpartition(" ")[2] in GATING for d in differences)


def more_errors(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether a larger share of B's requests failed, by more than one request."""
    expected = a["errors"] / max(1, a["requests"]) * b["requests"]
    return bool(b["errors"] > expected + 1)


def _interval(found: dict[str, Any], metric: str, quantile: str) -> Interval | None:
    intervals = found.get("detail", {}).get("ci95", {}).get(metric)
    if not intervals:
        return None
    low, high = intervals[quantile]
    # The estimate itself always lies within: the method needs that, and a bootstrap's ends need not grant it.
    value = found[metric][quantile]
    return min(low, value), max(high, value)


def _verdict(difference: float, interval: Interval | None, tolerance: float) -> Verdict:
    if interval is None:
        return "same" if abs(difference) <= tolerance else "changed"
    low, high = interval
    if low > tolerance:
        return "worse"
    if high < -tolerance:
        return "better"
    return "same" if -tolerance <= low and high <= tolerance else "unclear"


def _as_json(differences: Sequence[Difference]) -> dict[str, Any]:
    return {
        "regression": has_regression(differences),
        "differences": {
            d.figure: {"a": d.a, "b": d.b, "difference": round(d.b - d.a, 3), "ci95": d.interval, "verdict": d.verdict}
            for d in differences
        },
    }


def _as_text(differences: Sequence[Difference], reports: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'':18}{'A':>11}{'B':>11}{'B - A':>11}   {'95% interval':>22}"]
    for d in differences:
        interval = f"[{d.interval[0]:.2f}, {d.interval[1]:.2f}]" if d.interval else "-"
        lines.append(f"{d.figure:18}{d.a:>11.2f}{d.b:>11.2f}{d.b - d.a:>+11.2f}   {interval:>22}   {d.verdict}")
    for name in ("requests", "errors", "stalls", "throughput_tok_s", "goodput_rps"):
        a, b = reports[0][name], reports[1][name]
        lines.append(f"{name:18}{a:>11g}{b:>11g}{b - a:>+11g}")
    return "\n".join(lines)
