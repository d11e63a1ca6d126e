"""`legato load capacity`: the highest rate at which the targets hold.

Of one server, or of two by turns: probe for probe, so that whatever else the machine does meets both alike.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from common.config import option
from loadtest.client import Client, RequestFailed
from loadtest.dialect import ServerUnusable
from loadtest.options import LoadOptions
from loadtest.report import write_json
from loadtest.run import measure
from loadtest.search import Bounds, Probe, bracket, capacity_of, next_rate
from loadtest.shards import ShardFailed
from loadtest.single import run_loop
from loadtest.summary import report_of

MAX_INVALID_IN_A_ROW = 3
"""So often a rate is tried again when the generator could not keep up; then the search has no more to say."""

MAX_PROBES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions(LoadOptions):
    """Options of `legato load capacity`."""

    versus: str | None = option(None, "address of a second server, searched by turns with the first")
    least_rate: float = option(0.125, "lowest rate to try, requests per second")
    most_rate: float = option(256.0, "highest rate to try")
    precision_percent: float = option(5.0, "stop when the rate that breaks is so little above the one that holds")
    repeats: int = option(5, "searches, each with its own arrivals; their spread is the range (5: 94% sure)")
    quantile: Literal["p50", "p90", "p99", "p999", "max"] = option("p99", "of TTFT and of TBT, held against its target")
    max_error_percent: float = option(0.0, "failed requests that still count as held")
    json: Path | None = option(None, "write the result here, and each probe as it ends; a search resumes from it")

    def __post_init__(self) -> None:
        LoadOptions.__post_init__(self)
        if self.arrivals == "closed":
            raise ValueError("--arrivals closed has no rate to search")
        if not 0 < self.least_rate <= self.most_rate:
            raise ValueError(f"--least-rate {self.least_rate} and --most-rate {self.most_rate}: not in order")
        for name in ("precision_percent", "repeats"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")
        if self.versus is not None:
            Client(self.versus)

    @property
    def bounds(self) -> Bounds:
        return Bounds(least_rps=self.least_rate, most_rps=self.most_rate, precision=self.precision_percent / 100)


class SearchFailed(Exception):
    """The search cannot go on; what it has seen is kept."""


def capacity(options: CapacityOptions) -> int:
    """Search; 0 when a capacity was found for each server, 2 if not."""
    try:
        book = _Book.open(options)
        while (turn := book.next_turn()) is not None:
            server, repeat, rate_rps = turn
            found = _probe(options, server, repeat, rate_rps)
            book.add(server, repeat, rate_rps, found)
            print(_line(found, options), file=sys.stderr, flush=True)
    except (ServerUnusable, RequestFailed, ShardFailed, SearchFailed, OSError, ValueError) as error:
        print(f"legato load capacity: {error}", file=sys.stderr)
        return 2
    print(book.as_text())
    return 0


def _probe(options: CapacityOptions, server: str, repeat: int, rate_rps: float) -> dict[str, Any]:
    """One run at this rate; again with other arrivals if the generator could not keep up."""
    url = options.base_url if server == "a" else options.versus
    assert url is not None, "b is searched only where --versus names it"
    trace = options.read_trace()
    classes = options.classes(trace)
    reasons: list[str] = []
    for attempt in range(MAX_INVALID_IN_A_ROW):
        # Both servers get the same arrivals in the same repeat: the comparison is paired.
        seed = options.seed + 1000 * repeat + attempt
        outcome, _ = run_loop(measure(replace(options, base_url=url, rate=rate_rps, seed=seed)))
        found = report_of(outcome, classes, {})
        reasons = [reason for reason in found["detail"]["invalid_because"] if reason != "no measured request succeeded"]
        if "interrupted" in reasons:
            raise SearchFailed("interrupted; the same command goes on where this one ended, if it has --json")
        if not reasons:
            return {
                "server": server,
                "repeat": repeat,
                "rate_rps": rate_rps,
                "holds": holds(found, options),
                "ttft_ms": found["ttft_ms"][options.quantile],
                "gap_ms": _gap_of(found, options),
                "requests": found["requests"],
                "errors": found["errors"],
                "goodput_rps": found["goodput_rps"],
            }
    raise SearchFailed(f"{MAX_INVALID_IN_A_ROW} runs at {rate_rps:.3g} requests per second were invalid: {reasons[0]}")


def holds(found: dict[str, Any], options: CapacityOptions) -> bool:
    """Whether a run kept its targets."""
    ttft_ms = found["ttft_ms"][options.quantile]
    gap_ms = _gap_of(found, options)
    return bool(
        ttft_ms is not None
        and ttft_ms <= options.ttft_target_ms
        and (gap_ms is None or gap_ms <= options.tbt_target_ms)  # Answers of one token have no gap.
        and found["errors"] <= found["requests"] * options.max_error_percent / 100
    )


def _gap_of(found: dict[str, Any], options: CapacityOptions) -> float | None:
    """Of tokens; where the server tells none, of chunks, which is never less."""
    value: float | None = found["tbt_ms"][options.quantile]
    if value is None:
        value = found["detail"]["chunk_gap_ms"][options.quantile]
    return value


class _Book:
    """All probes so far, on disk where --json says so, and what to try next."""

    def __init__(self, options: CapacityOptions, probes: list[dict[str, Any]]) -> None:
        self._options = options
        self._probes = probes
        self._servers = ("a",) if options.versus is None else ("a", "b")

    @classmethod
    def open(cls, options: CapacityOptions) -> "_Book":
        """Begin, or go on with the file that an earlier run left.

        Raises:
            SearchFailed: If that file is of another search.
        """
        path = options.json
        if path is None or not path.exists():
            return cls(options, [])
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            probes, question = list(kept["probes"]), kept["question"]
        except (ValueError, KeyError, TypeError) as error:
            raise SearchFailed(f"{path} is there and holds no search") from error
        if question != _question(options):
            raise SearchFailed(f"{path} is of a search with other options; name another file, or remove it")
        return cls(options, probes)

    def next_turn(self) -> tuple[str, int, float] | None:
        """Return (server, repeat, rate) of the next probe: the server that has had fewer goes first."""
        if len(self._probes) >= MAX_PROBES:
            raise SearchFailed(f"no end after {MAX_PROBES} probes")
        for server in sorted(self._servers, key=lambda name: sum(p["server"] == name for p in self._probes)):
            for repeat in range(self._options.repeats):
                rate_rps = next_rate(self._seen(server, repeat), self._first(server, repeat), self._options.bounds)
                if rate_rps is not None:
                    return server, repeat, rate_rps
        return None

    def add(self, server: str, repeat: int, rate_rps: float, found: dict[str, Any]) -> None:
        """Keep a probe."""
        self._probes.append(found)
        if self._options.json is not None:
            write_json(
                self._options.json,
                {"question": _question(self._options), "capacity": self._capacities(), "probes": self._probes},
            )

    def as_text(self) -> str:
        """Return the result for a terminal."""
        names = {"a": self._options.base_url, "b": self._options.versus}
        lines = []
        for server, found in self._capacities().items():
            lines.append(
                f"{names[server]}: {found['rate_rps']:.3g} requests/s, {found['low_rps']:.3g} to "
                f"{found['high_rps']:.3g} ({found['coverage']:.0%} sure)"
            )
        return "\n".join(lines)

    def _seen(self, server: str, repeat: int) -> list[Probe]:
        return [
            Probe(rate_rps=probe["rate_rps"], holds=probe["holds"])
            for probe in self._probes
            if probe["server"] == server and probe["repeat"] == repeat
        ]

    def _first(self, server: str, repeat: int) -> float:
        """A repeat begins where the one before ended."""
        held = bracket(self._seen(server, repeat - 1))[0] if repeat else None
        return held or self._options.rate or 1.0

    def _capacities(self) -> dict[str, dict[str, float]]:
        found = {}
        for server in self._servers:
            done = [
                seen
                for repeat in range(self._options.repeats)
                if (seen := self._seen(server, repeat)) and next_rate(seen, 1.0, self._options.bounds) is None
            ]
            if (result := capacity_of(done)) is not None:
                found[server] = {
                    "rate_rps": round(result.rate_rps, 4),
                    "low_rps": round(result.low_rps, 4),
                    "high_rps": round(result.high_rps, 4),
                    "coverage": result.coverage,
                }
        return found


def _question(options: CapacityOptions) -> dict[str, Any]:
    """What must be equal for probes to belong together. The addresses may change; which server is which may not."""
    names = (
        *("arrivals", "burstiness", "requests", "duration", "prompt_len", "output_len", "trace", "max_total_len"),
        *("prefix_share", "turns", "think_time_s", "startup_s", "ttft_target_ms", "tbt_target_ms", "quantile"),
        *("least_rate", "most_rate", "precision_percent", "max_error_percent", "seed", "endpoint", "model"),
    )
    return {name: getattr(options, name) for name in names} | {"mix": str(options.mix or "")}


def _line(found: dict[str, Any], options: CapacityOptions) -> str:
    name = options.quantile
    return (
        f"{found['server']} repeat {found['repeat'] + 1}: {found['rate_rps']:8.3f} requests/s   "
        f"TTFT {name} {found['ttft_ms'] or 0:.0f} ms   gap {name} {found['gap_ms'] or 0:.0f} ms   "
        f"{found['errors']} errors   {'holds' if found['holds'] else 'breaks'}"
    )
