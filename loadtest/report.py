"""Reports as files: one JSON object, JSON lines, a page. No prompt or completion text is in any of them."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from common.clock import NS_PER_MS
from loadtest.charts import Chart, svg
from loadtest.drive import Outcome
from loadtest.records import RequestRecord
from loadtest.stats import QUANTILES
from loadtest.summary import METRICS

NAMES = {
    "ttft_ms": "TTFT",
    "tbt_ms": "TBT",
    "max_gap_ms": "largest gap of a stream",
    "tpot_ms": "TPOT",
    "e2e_ms": "end to end",
}

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:780px;margin:2rem auto;padding:0 1rem;color:#1f2328;background:#fff}
svg{width:100%;height:auto;margin:.6rem 0}
svg text{font:11px system-ui}
svg .title{font-weight:600;font-size:13px}
.grid{stroke:#e5e7eb}
.limit{stroke:#b91c1c;stroke-dasharray:5 4}
.band{fill:#000;opacity:.06}
.bad{color:#b91c1c}
pre{overflow:auto}
"""


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write a report; a reader never sees half of one."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    scratch.replace(path)


def write_lines(path: Path, outcome: Outcome) -> None:
    """Write a line for each request that was sent, measured or not, in the order of their arrivals."""
    with path.open("w", encoding="utf-8") as file:
        for record in sorted(outcome.records, key=lambda record: (record.scheduled_ns, record.index, record.turn)):
            file.write(json.dumps(line_of(record, outcome.start_ns)) + "\n")


def line_of(record: RequestRecord, start_ns: int) -> dict[str, Any]:
    """One request as figures. Chunk times are offsets from the scheduled arrival."""
    return {
        "index": record.index,
        "turn": record.turn,
        "class": record.class_name,
        "measured": record.is_measured,
        "error": record.error,
        "scheduled_ms": _ms(record.scheduled_ns - start_ns),
        "send_lag_ms": _ms(record.send_lag_ns()),
        "prompt_tokens": record.num_prompt_tokens,
        "prompt_tokens_wanted": record.prompt_len,
        "output_tokens": record.num_tokens,
        "output_tokens_wanted": record.output_len,
        "finish_reason": record.finish_reason,
        "ttft_ms": _ms(record.ttft_ns()),
        "ttft_from_send_ms": _ms(record.ttft_from_send_ns()),
        "e2e_ms": _ms(record.e2e_ns()),
        "tpot_ms": _ms(record.tpot_ns()),
        "max_gap_ms": _ms(record.max_gap_ns()),
        "chunks_ms": [_ms(at_ns - record.scheduled_ns) for at_ns in record.chunk_ns],
    }


def as_text(found: dict[str, Any]) -> str:
    """Return a report for a terminal."""
    lines = [f"{'':30}{'p50':>10}{'p90':>10}{'p99':>10}{'p99.9':>10}{'max':>10}"]
    lines += [f"{NAMES[metric] + ' (ms)':30}" + row_of(found[metric]) for metric in METRICS]
    detail = found["detail"]
    lines.append(
        f"\n{found['requests']} requests in {detail['window_s']} s, {found['errors']} errors"
        + (f" {detail['errors_by_kind']}" if found["errors"] else "")
        + f", {found['stalls']} stalls; {found['throughput_tok_s']} tokens/s, goodput {found['goodput_rps']} requests/s"
    )
    unknown = detail["token_counts"]["requests_with_unknown_tokens"]
    if unknown:
        lines.append(f"{unknown} streams told no number of tokens: their chunks count for gaps, not for TBT")
    lines += [f"INVALID: {reason}" for reason in detail["invalid_because"]]
    return "\n".join(lines)


def write_html(path: Path, title: str, text: str, charts: Sequence[Chart], found: dict[str, Any]) -> None:
    """Write a page that needs nothing but itself.

    Args:
        path: Where.
        title: Its heading.
        text: The report as for a terminal.
        charts: Drawn in order.
        found: Shown whole at the end, as JSON.
    """
    mark = "" if found.get("valid", True) else ' class="bad"'
    drawings = "\n".join(svg(chart) for chart in charts)
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n<pre{mark}>{escape(text)}</pre>\n{drawings}\n"
        f"<details><summary>All figures</summary><pre>{escape(json.dumps(found, indent=2))}</pre></details>\n"
        "</body></html>\n",
        encoding="utf-8",
    )


def row_of(summary: dict[str, float | None]) -> str:
    """The quantiles of a distribution as columns."""
    values = [summary[name] for name in QUANTILES]
    return "".join(f"{'-' if value is None else format(value, '.1f'):>10}" for value in values)


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else round(value_ns / NS_PER_MS, 4)
