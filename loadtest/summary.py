"""From the records of a run to its figures."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from common.clock import NS_PER_MS, NS_PER_S
from loadtest.drive import NOT_SENT, Outcome
from loadtest.lag import MAX_LOOP_LAG_MS, MAX_LOOP_LAG_P99_MS, MAX_SEND_LAG_P99_MS
from loadtest.records import RequestRecord
from loadtest.stats import Sample, confidence_intervals, summarize
from loadtest.workload import RequestClass

METRICS = ("ttft_ms", "tbt_ms", "max_gap_ms", "tpot_ms", "e2e_ms")
"""The distributions of a report, each with the keys of loadtest.stats.QUANTILES."""

Targets = dict[str, RequestClass]
"""Each class by its name."""


def report_of(outcome: Outcome, classes: Sequence[RequestClass], about: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a run, fit for JSON.

    Args:
        outcome: What the run brought.
        classes: With their targets.
        about: What else a reader must know to repeat the run; lands in `detail`.
    """
    targets = {request_class.name: request_class for request_class in classes}
    measured = [record for record in outcome.records if record.is_measured]
    succeeded = [record for record in measured if record.is_ok]
    groups = _groups(succeeded)
    reasons = reasons_against(outcome)
    window_s = max(0, outcome.window_end_ns - outcome.window_start_ns) / NS_PER_S
    return {
        "valid": not reasons,
        "requests": len(measured),
        "errors": sum(record.is_failed for record in measured),
        **{metric: _summary_of(groups[metric]) for metric in METRICS},
        "stalls": sum(num_stalls(record, targets) for record in measured),
        "throughput_tok_s": _per_second(_tokens_in_window(outcome), window_s),
        "goodput_rps": _per_second(sum(meets_targets(record, targets) for record in succeeded), window_s),
        "detail": {
            **about,
            "invalid_because": reasons,
            "errors_by_kind": dict(sorted(Counter(r.error for r in measured if r.is_failed).items())),
            "window_s": round(window_s, 3),
            "requests_around_window": len(outcome.records) - len(measured),
            "targets_ms": {name: {"ttft": c.ttft_target_ms, "tbt": c.tbt_target_ms} for name, c in targets.items()},
            "ci95": {metric: confidence_intervals(Sample.of(groups[metric])) for metric in METRICS},
            "ttft_from_send_ms": _summary_of(groups["ttft_from_send_ms"]),
            "e2e_from_send_ms": _summary_of(groups["e2e_from_send_ms"]),
            "chunk_gap_ms": _summary_of(groups["chunk_gap_ms"]),
            "token_counts": _token_counts(succeeded),
            "generator": generator_lag(outcome),
            "classes": {name: _class_report(name, measured, targets, window_s) for name in targets},
        },
    }


def meets_targets(record: RequestRecord, targets: Targets) -> bool:
    """Whether a request succeeded, began within its TTFT target, and never stalled."""
    ttft_ns = record.ttft_ns()
    if not record.is_ok or ttft_ns is None:
        return False
    return ttft_ns <= targets[record.class_name].ttft_target_ms * NS_PER_MS and num_stalls(record, targets) == 0


def num_stalls(record: RequestRecord, targets: Targets) -> int:
    """Gaps above the request's TBT target.

    A stream that broke off counts too, with the silence in which it did: a server that hangs for ever stalls.
    """
    gaps_ns = record.chunk_gaps_ns()
    if record.is_failed and record.chunk_ns:
        gaps_ns.append(record.ended_ns - record.chunk_ns[-1])
    target_ns = targets[record.class_name].tbt_target_ms * NS_PER_MS
    return sum(gap_ns > target_ns for gap_ns in gaps_ns)


def reasons_against(outcome: Outcome) -> list[str]:
    """Return why the run proves nothing; empty if it is valid. Errors of the server do not make a run invalid."""
    measured = [record for record in outcome.records if record.is_measured]
    reasons = []
    if outcome.was_interrupted:
        reasons.append("interrupted")
    if not any(record.is_ok for record in measured):
        reasons.append("no measured request succeeded")
    if num_not_sent := sum(record.error == NOT_SENT for record in outcome.records):
        reasons.append(f"{num_not_sent} requests not sent: as many as allowed were in flight")
    return reasons + lag_reasons(outcome)


def lag_reasons(outcome: Outcome) -> list[str]:
    """Return which of the generator's own limits it broke."""
    lag = generator_lag(outcome)
    limits = {
        "send_lag_p99_ms": MAX_SEND_LAG_P99_MS,
        "loop_lag_p99_ms": MAX_LOOP_LAG_P99_MS,
        "loop_lag_max_ms": MAX_LOOP_LAG_MS,
    }
    return [
        f"the generator did not keep up: {figure} is {lag[figure]}, the limit {limit}"
        for figure, limit in limits.items()
        if lag[figure] > limit
    ]


def generator_lag(outcome: Outcome) -> dict[str, float]:
    """How late the generator was, in sending and in everything else."""
    send = summarize([record.send_lag_ns() / NS_PER_MS for record in outcome.records])
    loop = summarize([lag_ns / NS_PER_MS for lag_ns in outcome.loop_lags_ns])
    return {
        "send_lag_p99_ms": send["p99"] or 0.0,
        "send_lag_max_ms": send["max"] or 0.0,
        "loop_lag_p99_ms": loop["p99"] or 0.0,
        "loop_lag_max_ms": loop["max"] or 0.0,
    }


def _groups(records: Sequence[RequestRecord]) -> dict[str, list[list[float]]]:
    """For each metric, the values of each request, in milliseconds."""
    return {
        "ttft_ms": [_ms(record.ttft_ns()) for record in records],
        "tbt_ms": [_ms(*(record.token_gaps_ns() or ())) for record in records],
        "max_gap_ms": [_ms(record.max_gap_ns()) for record in records],
        "tpot_ms": [_ms(record.tpot_ns()) for record in records],
        "e2e_ms": [_ms(record.e2e_ns()) for record in records],
        "ttft_from_send_ms": [_ms(record.ttft_from_send_ns()) for record in records],
        "e2e_from_send_ms": [_ms(record.e2e_from_send_ns()) for record in records],
        "chunk_gap_ms": [_ms(*record.chunk_gaps_ns()) for record in records],
    }


def _ms(*values_ns: float | None) -> list[float]:
    return [value_ns / NS_PER_MS for value_ns in values_ns if value_ns is not None]


def _summary_of(groups: list[list[float]]) -> dict[str, float | None]:
    return summarize([value for group in groups for value in group])


def _per_second(count: float, window_s: float) -> float:
    return round(count / window_s, 3) if window_s > 0 else 0.0


def _tokens_in_window(outcome: Outcome) -> float:
    """Output tokens of all requests that arrived in the window; a chunk's tokens are its stream's mean."""
    total = 0.0
    for record in outcome.records:
        in_window = sum(outcome.window_start_ns <= at_ns < outcome.window_end_ns for at_ns in record.chunk_ns)
        if in_window:
            total += in_window * (record.num_tokens or len(record.chunk_ns)) / len(record.chunk_ns)
    return total


def _token_counts(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Whether tokens could be told from chunks, and whether lengths came out as asked."""
    known = [record for record in records if record.token_gaps_ns() is not None]
    num_chunks = sum(len(record.chunk_ns) for record in known)
    return {
        "requests_with_known_tokens": len(known),
        "requests_with_unknown_tokens": len(records) - len(known),
        "tokens_per_chunk": round(sum(r.num_tokens or 0 for r in known) / num_chunks, 4) if num_chunks else None,
        "outputs_of_other_length": sum(record.num_tokens != record.output_len for record in known),
        "prompts_of_other_length": sum(
            record.turn == 0 and record.num_prompt_tokens not in (None, record.prompt_len) for record in records
        ),
        "prompt_tokens": sum(record.num_prompt_tokens or 0 for record in records),
        "output_tokens": sum(record.num_tokens or 0 for record in records),
    }


def _class_report(name: str, measured: Sequence[RequestRecord], targets: Targets, window_s: float) -> dict[str, Any]:
    own = [record for record in measured if record.class_name == name]
    succeeded = [record for record in own if record.is_ok]
    groups = _groups(succeeded)
    return {
        "requests": len(own),
        "errors": sum(record.is_failed for record in own),
        **{metric: _summary_of(groups[metric]) for metric in METRICS},
        "stalls": sum(num_stalls(record, targets) for record in own),
        "goodput_rps": _per_second(sum(meets_targets(record, targets) for record in succeeded), window_s),
    }
