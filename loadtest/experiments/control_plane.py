"""What the ring itself costs: added TTFT and TBT by hop, and CPU per token of each process.

    python -m loadtest.experiments.control_plane --streams 16,64,256 --json control-plane.json

The worker is simulated, so that iterations take what they take on a GPU and the rest of the machine is the system's.
A token's *lag* at a hop is how long after the iteration's end the hop had it. What a hop adds to a gap between tokens
is the difference of two lags, which is what a stream feels: a constant lag moves a stream and makes no gap longer.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.clock import NS_PER_MS
from common.cost.devices import DEVICES
from common.cost.load import Load
from common.cost.roofline import Roofline
from common.cost.shapes import SHAPES
from loadtest.drive import Outcome
from loadtest.experiments.ring_witness import Sightings, witness_at
from loadtest.experiments.system import COMMANDS, RunningSystem, cpu_s, memory_bytes, running
from loadtest.options import LoadOptions
from loadtest.records import RequestRecord
from loadtest.single import run_here, run_loop
from loadtest.summary import generator_lag, reasons_against

PROFILE = "a100-mistral-7b"
ROOFLINE = Roofline(SHAPES["mistral-7b"], DEVICES["a100-80"])
"""Of that profile."""
PROMPT_LEN = 64
NUM_ALONE = 40
"""Requests one at a time, for the TTFT of an idle system."""
SPARE_SLOTS = 16
"""For the witness and its knocks, beside the streams."""
MAX_ODD_TOKENS = 2
"""Tokens that a stream's first piece may hold; with more, its tokens were not found."""
HOPS = ("to scheduler", "to text", "to client", "all")

Times = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lags:
    """Of every token that clients read in the measured window: its lag at each hop of HOPS, in nanoseconds; and the
    differences to the lags of the token before it in the same stream."""

    lags: dict[str, Times]
    added: dict[str, Times]
    num_unmatched: int  # streams whose tokens could not be told apart by iteration


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement; 0 when every part was valid."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.experiments.control_plane")
    parser.add_argument("--streams", default="16,64,256", help="numbers of streams to measure with")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, for each of them")
    parser.add_argument("--output-len", type=int, default=256, help="tokens of a stream before the next begins")
    parser.add_argument("--port", type=int, default=8640, help="of the system that is started")
    parser.add_argument("--json", type=Path, help="write all figures here")
    flags = parser.parse_args(argv)
    counts = [int(count) for count in flags.streams.split(",")]
    slots = str(max(counts) + SPARE_SLOTS)
    environ = {"LEGATO_MAX_NUM_SLOTS": slots, "LEGATO_MAX_RUNNING": slots}
    with (
        tempfile.TemporaryDirectory() as fits,
        running(flags.port, ["--device", "simulated", "--profile", PROFILE], environ, Path(fits)) as system,
    ):
        found: dict[str, Any] = {
            "machine": f"{platform.machine()}, {_num_cores()} cores, Python {platform.python_version()}",
            "profile": PROFILE,
            "ttft_alone": run_loop(_measure_alone(system)),
            "runs": [],
        }
        for count in counts:
            found["runs"].append(run_loop(_measure(system, count, flags.seconds, flags.output_len)))
            print(_as_text(found["runs"][-1]), file=sys.stderr, flush=True)
    print(_as_markdown(found))
    if flags.json is not None:
        flags.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if all(run["valid"] for run in found["runs"]) else 1


async def _measure_alone(system: RunningSystem) -> dict[str, float]:
    """TTFT of single requests to an idle system, less what the device takes for them."""
    options = LoadOptions(
        base_url=system.url,
        arrivals="closed",
        users=1,
        requests=NUM_ALONE,
        prompt_len=str(PROMPT_LEN),
        output_len="2",
        startup_s=0.5,
        drain_s=0.0,
    )
    outcome, _, _ = await run_here(options)
    load = Load()
    load.add_chunk(0, PROMPT_LEN, is_sampled=True)
    device_ns = ROOFLINE.time_ns(load)
    records = [record for record in outcome.records if record.is_measured]
    added = [ttft_ns - device_ns for record in records if (ttft_ns := record.ttft_from_send_ns()) is not None]
    return {"device_ms": round(device_ns / NS_PER_MS, 3), **_quantiles(np.array(added))}


async def _measure(system: RunningSystem, num_streams: int, seconds: float, output_len: int) -> dict[str, Any]:
    """One number of streams."""
    options = LoadOptions(
        base_url=system.url,
        arrivals="closed",
        users=num_streams,
        duration=seconds,
        prompt_len=str(PROMPT_LEN),
        output_len=str(output_len),
        startup_s=4.0,
        drain_s=10.0,
        seed=num_streams,
    )
    addresses = [line["address"] for line in system.logged("inbox_bound")]
    pids = system.pids()
    async with witness_at(addresses[0], stream_len=4000) as witness:
        meter = asyncio.create_task(_meter(pids, options.startup_s, seconds), name="meter")
        outcome, _, _ = await run_here(options)
        used = await meter
    lags = follow(outcome, witness.seen)
    num_tokens = sum(_num_read(record, outcome) for record in outcome.records)
    window_s = (outcome.window_end_ns - outcome.window_start_ns) / 1e9
    per_token = max(1.0, num_tokens / window_s * used["seconds"])
    return {
        "streams": num_streams,
        "valid": not reasons_against(outcome),
        "invalid_because": reasons_against(outcome),
        "generator": generator_lag(outcome),
        "tokens_per_s": round(num_tokens / window_s, 1),
        "iteration_ms": _quantiles(np.diff(np.array(witness.seen.worker_ns))),
        "lag_ms": {hop: _quantiles(lags.lags[hop]) for hop in HOPS},
        "added_tbt_ms": {hop: _quantiles(lags.added[hop]) for hop in HOPS},
        "submit_to_queued_ms": _quantiles(np.array(witness.seen.queued_ns)),
        "unmatched_streams": lags.num_unmatched,
        "cpu_us_per_token": {name: round(1e6 * used[name] / per_token, 1) for name in (*COMMANDS, "generator")},
        "cpu_share": {name: round(used[name] / used["seconds"], 3) for name in (*COMMANDS, "generator")},
        "memory_mb": {name: round(memory_bytes(pid) / 1e6) for name, pid in pids.items()},
        "worker_lateness": system.metric("worker", "legato_worker_simulated_lateness_seconds_bucket"),
    }


async def _meter(pids: dict[str, int], startup_s: float, seconds: float) -> dict[str, float]:
    """CPU time of every process, and our own, over the measured window, more or less."""
    await asyncio.sleep(startup_s)
    before, began_s, own_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    return {**used, "generator": time.process_time() - own_s, "seconds": time.monotonic() - began_s}


def follow(outcome: Outcome, seen: Sightings) -> Lags:
    """Find the iteration of every token that was read in the window.

    A stream has one token of each iteration, in order. A piece that was read at some time ends with the token of the
    latest iteration whose text was ready by then, as far as later pieces leave it one; tokens between two pieces came
    with the second. (A lag of more than an iteration is so taken for a smaller one, but its stream does not add up in
    the end, and such streams are counted.)
    """
    worker_ns, scheduler_ns, tokenizer_ns = (
        np.array(times) for times in (seen.worker_ns, seen.scheduler_ns, seen.tokenizer_ns)
    )
    lags: dict[str, list[Times]] = {hop: [np.zeros(0, np.int64)] for hop in HOPS}
    added: dict[str, list[Times]] = {hop: [np.zeros(0, np.int64)] for hop in HOPS}
    num_unmatched = 0
    for record in outcome.records:
        if not record.is_ok or record.num_tokens is None or len(record.chunk_ns) < 2:
            continue  # Cut at the end of the run.
        piece_ns = np.array(record.chunk_ns)
        latest = np.searchsorted(tokenizer_ns, piece_ns, side="right") - 1
        places = np.arange(len(piece_ns))
        ends = np.minimum.accumulate((latest - places)[::-1])[::-1] + places
        first = int(ends[-1]) - record.num_tokens + 1
        if first < 0 or not 0 <= int(ends[0]) - first <= MAX_ODD_TOKENS:
            num_unmatched += 1
            continue
        iterations = np.arange(first, first + record.num_tokens)
        read_ns = piece_ns[np.searchsorted(ends, iterations)]
        parts = {
            "to scheduler": scheduler_ns[iterations] - worker_ns[iterations],
            "to text": tokenizer_ns[iterations] - scheduler_ns[iterations],
            "to client": read_ns - tokenizer_ns[iterations],
            "all": read_ns - worker_ns[iterations],
        }
        inside = (read_ns >= outcome.window_start_ns) & (read_ns < outcome.window_end_ns)
        for hop, lag_ns in parts.items():
            lags[hop].append(lag_ns[inside])
            added[hop].append(np.diff(lag_ns)[inside[1:]])
    return Lags(
        {hop: np.concatenate(parts) for hop, parts in lags.items()},
        {hop: np.concatenate(parts) for hop, parts in added.items()},
        num_unmatched,
    )


def _num_read(record: RequestRecord, outcome: Outcome) -> float:
    """Tokens of a request that were read in the window. A cut one's pieces count as one each: no total was told."""
    inside = sum(outcome.window_start_ns <= at_ns < outcome.window_end_ns for at_ns in record.chunk_ns)
    return inside * (record.num_tokens or len(record.chunk_ns)) / max(1, len(record.chunk_ns))


def _quantiles(values_ns: NDArray[Any]) -> dict[str, float]:
    names = ("p50", "p90", "p99", "p999")
    if len(values_ns) == 0:
        return dict.fromkeys(names, float("nan"))
    found = np.quantile(values_ns, [0.5, 0.9, 0.99, 0.999]) / NS_PER_MS
    return {name: round(float(value), 3) for name, value in zip(names, found, strict=True)}


def _as_text(run: dict[str, Any]) -> str:
    why = "" if run["valid"] else f"   INVALID: {'; '.join(run['invalid_because'])}"
    return (
        f"{run['streams']} streams: {run['tokens_per_s']} tokens/s, added TBT p99 {run['added_tbt_ms']['all']['p99']} "
        f"ms, lag p99 {run['lag_ms']['all']['p99']} ms, {run['unmatched_streams']} unmatched, CPU share "
        f"{run['cpu_share']}{why}"
    )


def _as_markdown(found: dict[str, Any]) -> str:
    lines = [
        f"TTFT of a single request to the idle system, less the device's {found['ttft_alone']['device_ms']} ms: "
        f"P50 {found['ttft_alone']['p50']} ms, P99 {found['ttft_alone']['p99']} ms.",
        "",
        "| streams | tokens/s | iteration P50 ms | hop | lag P50 | lag P99 | added TBT P50 | P90 | P99 | P99.9 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in found["runs"]:
        for hop in HOPS:
            lag, added = run["lag_ms"][hop], run["added_tbt_ms"][hop]
            lines.append(
                f"| {run['streams']} | {run['tokens_per_s']:.0f} | {run['iteration_ms']['p50']} | {hop} | {lag['p50']} "
                f"| {lag['p99']} | {added['p50']} | {added['p90']} | {added['p99']} | {added['p999']} |"
            )
    names = (*COMMANDS, "generator")
    lines += ["", "| streams | submit to queued P50 / P99 ms | " + " | ".join(f"{n} µs/token" for n in names) + " |"]
    lines.append("| --- " * (len(names) + 2) + "|")
    for run in found["runs"]:
        queued = run["submit_to_queued_ms"]
        cells = [f"{run['cpu_us_per_token'][name]} ({run['cpu_share'][name]:.0%})" for name in names]
        lines.append(f"| {run['streams']} | {queued['p50']} / {queued['p99']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
