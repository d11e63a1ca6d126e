"""Traces of real traffic: each row the lengths of one request and, in some, when it arrived.

A trace is a CSV file with the columns `num_prefill_tokens` and `num_decode_tokens`, and optionally `arrived_at_s` or
`arrived_at_ms`. The well-known ones need no file: where it is absent, lengths are drawn from a log-normal
distribution with the same median and P90, and the report says that they were.
"""

import csv
import random
from dataclasses import dataclass
from pathlib import Path

from common.clock import NS_PER_MS, NS_PER_S
from loadtest import arrivals
from loadtest.lengths import lognormal

NUM_BUILT_IN_ROWS = 10_000
"""Rows drawn for a trace whose file is absent: enough that P99 stands on a hundred of them."""

MAX_ROWS = 1_000_000


class TraceError(ValueError):
    """The trace cannot be used; the message says why and names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace."""

    prompt_len: int
    output_len: int
    arrival_ns: int | None = None  # offset from the first request; absent where the trace has no arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace, and where it came from, in words for the report."""

    rows: tuple[TraceRow, ...]
    source: str

    @property
    def has_arrivals(self) -> bool:
        return self.rows[0].arrival_ns is not None

    def arrivals_ns(self) -> list[int]:
        """All arrivals in order.

        Raises:
            TraceError: If the trace has none.
        """
        if not self.has_arrivals:
            raise TraceError(f"{self.source} has no arrival times; choose other arrivals, such as poisson")
        return sorted(row.arrival_ns or 0 for row in self.rows)

    def no_longer_than(self, max_total_len: int) -> "Trace":
        """The rows whose prompt and output together fit; the source says how many were left out.

        Raises:
            TraceError: If none fits.
        """
        kept = tuple(row for row in self.rows if row.prompt_len + row.output_len <= max_total_len)
        if not kept:
            raise TraceError(f"no row of {self.source} fits {max_total_len} tokens")
        left_out = len(self.rows) - len(kept)
        note = f"; {left_out} of {len(self.rows)} rows above {max_total_len} tokens left out" if left_out else ""
        return Trace(rows=kept, source=self.source + note)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Median and P90 of a published trace; its mean rate where it has arrivals."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    rate_rps: float | None = None


BUILT_IN = {
    # openchat_sharegpt4 as used by Sarathi-Serve (OSDI 2024), Table 2.
    "sharegpt_8k": _Shape(prompt=(1730, 5696), output=(415, 834)),
    # arXiv summarization, cut to 4,096 tokens (Vidur, MLSys 2024).
    "arxiv_sum_4k": _Shape(prompt=(2730, 3702), output=(167, 372)),
    # Bilingual-Web-Book translation (Etalon): outputs longer than prompts.
    "bwb_translation_4k": _Shape(prompt=(1037, 1453), output=(1601, 2149)),
    # Azure LLM inference trace 2023 (Patel et al., Splitwise, ISCA 2024): conversation and code services.
    "azure_2023_conv": _Shape(prompt=(1020, 2734), output=(129, 424), rate_rps=5.53),
    "azure_2023_code": _Shape(prompt=(1469, 5188), output=(13, 55), rate_rps=2.57),
    # Kimi conversations (Qin et al., Mooncake, FAST 2025).
    "mooncake_conversation": _Shape(prompt=(6909, 27367), output=(350, 597), rate_rps=3.40),
    "mooncake_synthetic": _Shape(prompt=(11587, 38611), output=(69, 389), rate_rps=3.91),
}
"""Traces that need no file, under their file's name without `.csv`."""


def load_trace(name_or_path: str, seed: int = 0) -> Trace:
    """Return the trace in a CSV file, or the built-in one of that name where there is no such file.

    Raises:
        TraceError: If there is neither, or the file is no trace.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return Trace(rows=_read(path), source=f"trace {path.name}")
    if path.stem in BUILT_IN:
        shape = BUILT_IN[path.stem]
        return Trace(rows=_draw(shape, random.Random(f"{seed}:{path.stem}")), source=f"built-in lengths of {path.stem}")
    raise TraceError(f"there is no file {name_or_path!r}; built in are {', '.join(sorted(BUILT_IN))}")


def _read(path: Path) -> tuple[TraceRow, ...]:
    rows: list[TraceRow] = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            try:
                row = TraceRow(
                    prompt_len=int(line["num_prefill_tokens"]),
                    output_len=int(line["num_decode_tokens"]),
                    arrival_ns=_arrival_ns(line),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"row {len(rows) + 1} of {path.name}: {error!r}") from error
            if row.prompt_len >= 1 and row.output_len >= 1:  # Some published traces hold empty outputs.
                rows.append(row)
            if len(rows) > MAX_ROWS:
                raise TraceError(f"{path.name} has more than {MAX_ROWS} rows")
    if not rows:
        raise TraceError(f"{path.name} has no rows")
    return tuple(rows)


def _arrival_ns(line: dict[str, str]) -> int | None:
    if "arrived_at_s" in line:
        return round(float(line["arrived_at_s"]) * NS_PER_S)
    if "arrived_at_ms" in line:
        return round(float(line["arrived_at_ms"]) * NS_PER_MS)
    return None


def _draw(shape: _Shape, rng: random.Random) -> tuple[TraceRow, ...]:
    prompt, output = lognormal(*shape.prompt), lognormal(*shape.output)
    times = arrivals.poisson(shape.rate_rps, rng) if shape.rate_rps else None
    return tuple(
        TraceRow(
            prompt_len=prompt(rng),
            output_len=output(rng),
            arrival_ns=next(times) if times else None,
        )
        for _ in range(NUM_BUILT_IN_ROWS)
    )
