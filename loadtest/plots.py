"""The plots of a run: gap CDF, timeline of gaps, TTFT against prompt length, throughput."""

from collections.abc import Sequence

import numpy as np

from common.clock import NS_PER_MS, NS_PER_S
from loadtest.charts import Chart, Point, Series
from loadtest.drive import Outcome
from loadtest.records import RequestRecord

NUM_SLICES = 240
"""Parts of the run's time in a timeline. Each keeps its largest gap, so no stall is lost between points."""
NUM_CDF_POINTS = 600


def charts_of(outcome: Outcome, tbt_target_ms: float) -> list[Chart]:
    """Return the plots of a run."""
    measured = [record for record in outcome.records if record.is_measured and record.chunk_ns]
    chunk_gaps_ms = [gap_ns / NS_PER_MS for record in measured for gap_ns in record.chunk_gaps_ns()]
    token_gaps_ms = [gap_ns / NS_PER_MS for record in measured for gap_ns in record.token_gaps_ns() or ()]
    gaps = [at_gap for record in measured for at_gap in gaps_with_times(record, outcome.start_ns)]
    return [
        Chart(
            title="Gaps",
            x_label="gap (ms)",
            y_label="share of gaps at or below",
            series=[
                Series(name="between tokens", points=cdf(token_gaps_ms)),
                Series(name="between chunks", points=cdf(chunk_gaps_ms)),
            ],
            is_x_log=True,
        ),
        Chart(
            title="Gaps over time",
            x_label="time (s)",
            y_label="gap (ms)",
            series=timeline(gaps),
            limit=tbt_target_ms,
        ),
        Chart(
            title="TTFT against prompt length",
            x_label="prompt (tokens)",
            y_label="TTFT (ms)",
            series=[
                Series(
                    name="requests",
                    points=[(r.num_prompt_tokens or r.prompt_len, (r.ttft_ns() or 0) / NS_PER_MS) for r in measured],
                    kind="dots",
                )
            ],
        ),
        Chart(
            title="Throughput",
            x_label="time (s)",
            y_label="output tokens per second",
            series=[Series(name="all requests", points=throughput(outcome))],
            bands=[(_seconds(outcome.window_start_ns, outcome), _seconds(outcome.window_end_ns, outcome))],
        ),
    ]


def gaps_with_times(record: RequestRecord, start_ns: int) -> list[Point]:
    """(seconds from start_ns to the end of the gap, gap in milliseconds) for each gap of a request."""
    times = record.chunk_ns
    return [((times[i] - start_ns) / NS_PER_S, (times[i] - times[i - 1]) / NS_PER_MS) for i in range(1, len(times))]


def timeline(gaps: Sequence[Point]) -> list[Series]:
    """The largest and the median gap in each slice of time."""
    if not gaps:
        return []
    at_s, gap_ms = np.array(gaps).T
    edges = np.linspace(at_s.min(), at_s.max() + 1e-9, NUM_SLICES + 1)
    slices = np.digitize(at_s, edges) - 1
    largest, median = [], []
    for number in np.unique(slices):
        own = gap_ms[slices == number]
        middle_s = float(edges[number] + edges[number + 1]) / 2
        largest.append((middle_s, float(own.max())))
        median.append((middle_s, float(np.median(own))))
    return [Series(name="largest", points=largest, kind="dots"), Series(name="median", points=median)]


def cdf(values: Sequence[float]) -> list[Point]:
    """Points of the cumulative distribution, denser towards the tail, where the interest lies."""
    if not values:
        return []
    ordered = np.sort(np.asarray(values))
    shares = np.unique(np.concatenate([np.linspace(0, 1, NUM_CDF_POINTS // 2), 1 - np.geomspace(1e-5, 0.5, 300)]))
    return [(float(np.quantile(ordered, share)), float(share)) for share in shares]


def throughput(outcome: Outcome) -> list[Point]:
    """Output tokens per second in each second of the run."""
    arrived: dict[int, float] = {}
    for record in outcome.records:
        per_chunk = (record.num_tokens or len(record.chunk_ns)) / max(1, len(record.chunk_ns))
        for at_ns in record.chunk_ns:
            second = (at_ns - outcome.start_ns) // NS_PER_S
            arrived[second] = arrived.get(second, 0.0) + per_chunk
    return [(second + 0.5, arrived.get(second, 0.0)) for second in range(max(arrived, default=-1) + 1)]


def _seconds(at_ns: int, outcome: Outcome) -> float:
    return (at_ns - outcome.start_ns) / NS_PER_S
