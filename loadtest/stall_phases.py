"""Which of a stall test's gaps belong to which phase, and what that makes.

A gap that overlaps the time from an injected prompt's sending to its first token lies *during* an injection. Of the
others, those that end before the first injection lie *before*, those that begin when the last injected request has
ended lie *after*, and the rest lie *between*.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.clock import NS_PER_MS, NS_PER_S
from loadtest.charts import Chart, Series
from loadtest.drive import Outcome
from loadtest.plots import cdf, timeline
from loadtest.records import RequestRecord
from loadtest.report import row_of
from loadtest.stats import Sample, confidence_intervals, summarize
from loadtest.summary import generator_lag, lag_reasons

STEADY, INJECTED = "steady", "injected"
PHASES = ("before", "during", "between", "after")


@dataclass(slots=True, kw_only=True)
class StallOutcome:
    """What the test brought. Times in nanoseconds of the monotonic clock."""

    run: Outcome  # its window is the measured time of the steady streams
    first_injection_ns: int
    last_end_ns: int  # the last injected request ended
    num_streams: int
    inject_prompt_len: int
    tbt_target_ms: float
    has_given_up: bool = False


@dataclass(slots=True)
class PhaseGaps:
    """Gaps of the steady streams in one phase: for each request, in milliseconds."""

    groups: list[list[float]] = field(default_factory=list)

    def flat(self) -> list[float]:
        return [gap_ms for group in self.groups for gap_ms in group]


def gaps_by_phase(outcome: StallOutcome) -> dict[str, PhaseGaps]:
    """Sort every gap of the steady streams that lies in the measured time into its phase."""
    prefills = prefill_spans(outcome.run.records)
    phases = {name: PhaseGaps() for name in PHASES}
    for record in outcome.run.records:
        if record.class_name != STEADY:
            continue
        groups: dict[str, list[float]] = {name: [] for name in PHASES}
        for begin_ns, end_ns in itertools.pairwise(record.chunk_ns):
            if outcome.run.window_start_ns <= begin_ns and end_ns < outcome.run.window_end_ns:
                groups[_phase_of(begin_ns, end_ns, outcome, prefills)].append((end_ns - begin_ns) / NS_PER_MS)
        for name, group in groups.items():
            if group:
                phases[name].groups.append(group)
    return phases


def prefill_spans(records: Sequence[RequestRecord]) -> list[tuple[int, int]]:
    """When injected prompts were being worked on: from sending to first token (to the end, where none came), merged."""
    spans = sorted(
        (record.sent_ns or record.scheduled_ns, record.chunk_ns[0] if record.chunk_ns else record.ended_ns)
        for record in records
        if record.class_name == INJECTED
    )
    return list(_merged(spans))


def _merged(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Overlapping spans as one, in order."""
    if not spans:
        return
    begin, end = spans[0]
    for next_begin, next_end in spans[1:]:
        if next_begin > end:
            yield begin, end
            begin, end = next_begin, next_end
        else:
            end = max(end, next_end)
    yield begin, end


def _phase_of(begin_ns: int, end_ns: int, outcome: StallOutcome, prefills: list[tuple[int, int]]) -> str:
    # Only the last span that begins before the gap's end can overlap it: spans are merged.
    number = bisect.bisect_left(prefills, end_ns, key=lambda span: span[0]) - 1
    if number >= 0 and prefills[number][1] > begin_ns:
        return "during"
    if end_ns <= outcome.first_injection_ns:
        return "before"
    return "after" if begin_ns >= outcome.last_end_ns else "between"


def stall_report(outcome: StallOutcome) -> dict[str, Any]:
    """Return the result, fit for JSON. Gaps are chunk gaps: what a reader of a stream sees."""
    phases = gaps_by_phase(outcome)
    reasons = _reasons_against(outcome, phases)
    steady = [record for record in outcome.run.records if record.class_name == STEADY]
    injected = [record for record in outcome.run.records if record.class_name == INJECTED]
    ttfts_ms = [ttft_ns / NS_PER_MS for record in injected if (ttft_ns := record.ttft_ns()) is not None]
    return {
        "valid": not reasons,
        "streams": outcome.num_streams,
        "injections": len(injected),
        "errors": sum(record.is_failed for record in outcome.run.records),
        "gap_ms": {name: summarize(phases[name].flat()) for name in PHASES},
        "stalls": {name: sum(gap > outcome.tbt_target_ms for gap in phases[name].flat()) for name in PHASES},
        "gaps": {name: len(phases[name].flat()) for name in PHASES},
        "injected_ttft_ms": summarize(ttfts_ms),
        "detail": {
            "invalid_because": reasons,
            "tbt_target_ms": outcome.tbt_target_ms,
            "inject_prompt_len": outcome.inject_prompt_len,
            "ci95": {name: confidence_intervals(Sample.of(phases[name].groups)) for name in PHASES},
            "steady_requests": len(steady),
            "generator": generator_lag(outcome.run),
        },
    }


def _reasons_against(outcome: StallOutcome, phases: dict[str, PhaseGaps]) -> list[str]:
    reasons = ["interrupted"] if outcome.run.was_interrupted else []
    if outcome.has_given_up:
        reasons.append("a steady stream failed again and again")
    if any(record.is_failed for record in outcome.run.records if record.class_name == INJECTED):
        reasons.append("an injected prompt failed")
    reasons += [f"no gap was seen {name} the injections" for name in ("before", "during") if not phases[name].groups]
    return reasons + lag_reasons(outcome.run)


def stall_charts(outcome: StallOutcome) -> list[Chart]:
    """Return the timeline of the steady streams' gaps, and their distribution by phase."""
    start_ns = outcome.run.window_start_ns

    def seconds(at_ns: int) -> float:
        return (at_ns - start_ns) / NS_PER_S

    points = [
        (seconds(end_ns), (end_ns - begin_ns) / NS_PER_MS)
        for record in outcome.run.records
        if record.class_name == STEADY
        for begin_ns, end_ns in itertools.pairwise(record.chunk_ns)
        if start_ns <= begin_ns and end_ns < outcome.run.window_end_ns
    ]
    bands = [(seconds(begin_ns), seconds(end_ns)) for begin_ns, end_ns in prefill_spans(outcome.run.records)]
    phases = gaps_by_phase(outcome)
    return [
        Chart(
            title=f"Gaps of {outcome.num_streams} streams; shaded: prompts of {outcome.inject_prompt_len} tokens",
            x_label="time (s)",
            y_label="gap (ms)",
            series=timeline(points),
            limit=outcome.tbt_target_ms,
            bands=bands,
        ),
        Chart(
            title="Gaps by phase",
            x_label="gap (ms)",
            y_label="share of gaps at or below",
            series=[Series(name=name, points=cdf(phases[name].flat())) for name in PHASES],
            is_x_log=True,
        ),
    ]


def stall_text(found: dict[str, Any]) -> str:
    """Return the result for a terminal."""
    lines = [f"{'gap (ms)':14}{'p50':>10}{'p90':>10}{'p99':>10}{'p99.9':>10}{'max':>10}{'stalls':>10}"]
    lines += [f"{name:14}{row_of(found['gap_ms'][name])}{found['stalls'][name]:>10}" for name in PHASES]
    lines.append(f"{'injected TTFT':14}{row_of(found['injected_ttft_ms'])}")
    detail = found["detail"]
    lines.append(
        f"\n{found['streams']} steady streams, {found['injections']} prompts of {detail['inject_prompt_len']} tokens, "
        f"{found['errors']} errors; a stall is a gap above {detail['tbt_target_ms']:g} ms"
    )
    lines += [f"INVALID: {reason}" for reason in found["detail"]["invalid_because"]]
    return "\n".join(lines)
