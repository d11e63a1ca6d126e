"""Does the simulator tell what the real system does? `python -m loadtest.experiments.sim_vs_real`.

Runs the CPU system under one generated trace and fits the cost model to the recording of its scheduler; then under
another (other seed, other rate), and simulates that second run on the fitted device. Writes medians and P99 of both.
The simulator ends at the scheduler: what lies between that and the client is measured in the first run and added.
"""

import argparse
import csv
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from common.clock import ms
from common.ids import RequestId
from common.messages.streams import RequestArrived
from loadtest.experiments.cpu_target import cpu_name, legato
from loadtest.simulate.recorded import device_of
from services.scheduler.events import SendStreams
from services.scheduler.recording.files import segments_of
from services.scheduler.recording.segment import Segment, StepDecoder, event_of

FIGURES = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tbt_ms", "p50"), ("tbt_ms", "p99"))
AIM = 0.15
"""Of a real figure, by how much the predicted one may be off."""


def write_trace(path: Path, *, rate: float, duration_s: float, seed: int) -> int:
    """Write Poisson arrivals of chats of moderate length; how many."""
    generator = random.Random(seed)
    now_s = 0.0
    rows = []
    while (now_s := now_s + generator.expovariate(rate)) < duration_s:
        prompt_len = max(8, min(600, round(generator.lognormvariate(4.2, 0.8))))
        output_len = max(4, min(60, round(generator.lognormvariate(3.0, 0.5))))
        rows.append((f"{now_s:.3f}", prompt_len, output_len))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrived_at_s", "num_prefill_tokens", "num_decode_tokens"))
        writer.writerows(rows)
    return len(rows)


def measure(trace: Path, num_requests: int, target_ms: float, flags: list[str], folder: Path, result: Path) -> Any:
    """Replay a trace against the real system, which keeps its fits and recordings in folder; the report."""
    os.environ["LEGATO_RECORDINGS"] = str(folder / f"recording-{trace.stem}")
    with legato("stall_free", target_ms, flags, str(folder / "fits")) as url:
        argv = ["--base-url", url, "--arrivals", "trace", "--trace", str(trace), "--requests", str(num_requests)]
        argv += ["--startup-s", "0", "--tbt-target-ms", str(target_ms), "--json", str(result)]
        subprocess.run([sys.executable, "-m", "loadtest", "run", *argv], check=False, stdout=subprocess.DEVNULL)
    return json.loads(result.read_text())


def first_token_ms(recording: Path) -> list[float]:
    """Of each request in a recording, from its arrival at the scheduler until its first token left there."""
    arrived_ns: dict[RequestId, int] = {}
    found: list[float] = []
    for path in segments_of(recording):
        segment, decoder = Segment(path), StepDecoder()
        for step in segment.steps():
            event = event_of(step)
            if isinstance(event, RequestArrived):
                arrived_ns[event.request_id] = step.now_ns
            for effect in decoder.effects(step):
                for row in effect.batch.sampled if isinstance(effect, SendStreams) else ():
                    if (began_ns := arrived_ns.pop(row.request_id, None)) is not None:
                        found.append(ms(step.now_ns - began_ns))
    return found


def simulate(trace: Path, num_requests: int, target_ms: float, fit: Path, kv_tokens: int, result: Path) -> Any:
    """Replay the trace in the simulator, on the device of the saved fit."""
    argv = ["--device", str(fit), "--workload", str(trace), "--arrivals", "trace", "--requests", str(num_requests)]
    argv += ["--tbt-target-ms", str(target_ms), "--kv-tokens", str(kv_tokens), "--depth", "2", "--json", str(result)]
    subprocess.run([sys.executable, "-m", "loadtest.simulate", *argv], check=True, stdout=subprocess.DEVNULL)
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--durations-s", type=float, nargs=2, default=[120.0, 300.0], help="of the two runs")
    parser.add_argument("--rates", type=float, nargs=2, default=[1.2, 1.6], help="of the fitted and the predicted run")
    parser.add_argument("--tbt-target-ms", type=float, default=150.0)
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument("--output", type=Path, default=Path("docs/results/sim-vs-real.md"))
    options = parser.parse_args()
    flags = ["--kv-tokens", str(options.kv_tokens)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        first, second = folder / "first.csv", folder / "second.csv"
        num_first = write_trace(first, rate=options.rates[0], duration_s=options.durations_s[0], seed=1)
        num_second = write_trace(second, rate=options.rates[1], duration_s=options.durations_s[1], seed=2)
        fitted = measure(first, num_first, options.tbt_target_ms, flags, folder, folder / "first.json")
        device = device_of(folder / "recording-first")
        ring_ms = fitted["ttft_ms"]["p50"] - statistics.median(first_token_ms(folder / "recording-first"))
        saved = folder / "device.json"
        saved.write_bytes(msgspec.json.encode(device))
        real = measure(second, num_second, options.tbt_target_ms, flags, folder, folder / "second.json")
        predicted = simulate(
            second, num_second, options.tbt_target_ms, saved, options.kv_tokens, folder / "simulated.json"
        )
    lines = [
        "# Simulator against reality",
        "",
        f"{datetime.date.today()}, {cpu_name()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}.",
        "",
        "```",
        f"python -m loadtest.experiments.sim_vs_real --durations-s {options.durations_s[0]:g} "
        f"{options.durations_s[1]:g} --rates {options.rates[0]:g} {options.rates[1]:g} "
        f"--tbt-target-ms {options.tbt_target_ms:g}",
        "```",
        "",
        f"The cost model was fitted to the recording of a run of {num_first} requests at {options.rates[0]:g}/s "
        f"({device.fit.num_measured} iterations, {device.fit.error:.1%} off on average), and predicts another of "
        f"{num_second} requests at {options.rates[1]:g}/s with another seed. Between client and scheduler a first "
        f"token took {ring_ms:.0f} ms in the first run, at the median, which is added to what is simulated.",
        "",
        "| figure | real | simulated | difference |",
        "| --- | --- | --- | --- |",
    ]
    num_within = 0
    for metric, quantile in FIGURES:
        ours, theirs = predicted[metric][quantile], real[metric][quantile]
        ours += ring_ms if metric == "ttft_ms" else 0.0
        num_within += abs(ours / theirs - 1) <= AIM
        lines.append(f"| {metric} {quantile} | {theirs:.1f} | {ours:.1f} | {ours / theirs - 1:+.1%} |")
    lines += ["", f"{num_within} of the {len(FIGURES)} are within the aim of {AIM:.0%}."]
    if not real["valid"]:
        lines += ["", f"The generator calls the real run invalid: {real['detail']}"]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
