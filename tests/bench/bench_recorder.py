"""What the flight recorder costs: `python -m tests.bench.bench_recorder`.

For growing numbers of streams that decode at a fixed pace: the CPU that the core takes, and what recording takes, in
the loop and in its thread, each by the thread's own clock and as a share of one core; what it writes; and how long the
snapshot at the start of a segment holds the loop up. Medians of some rounds. Not a test: it asserts nothing.
"""

import argparse
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from common.ids import InstanceId
from common.process import tune_garbage_collector
from services.scheduler.recording.recorder import FLUSH_S, Recorder
from tests.bench.streams import Streams


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run."""

    core_s: float  # CPU of the core's steps
    recorder_s: float  # CPU of recording them, in the loop and in its thread
    num_bytes: int
    snapshot_ms: float


def run(num_streams: int, num_iterations: int, pace_per_s: float, directory: Path) -> Cost:
    """So many paced iterations, recorded into an empty directory."""
    streams = Streams(num_streams, prompt_len=256)
    recorder = Recorder(directory, streams.core, streams.limits, InstanceId("bench"), max_bytes=10**9, max_age_s=3600.0)
    thread = next(thread for thread in threading.enumerate() if thread.name == "recorder")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    began = time.perf_counter()
    recorder.begin(streams.now_ns)
    snapshot_ms = 1e3 * (time.perf_counter() - began)
    _wait_idle(recorder)
    tune_garbage_collector()
    head_bytes = _bytes_in(directory)
    in_thread = time.clock_gettime(clock)
    core_s = in_loop_s = 0.0
    due = time.monotonic()
    for _ in range(num_iterations):
        event = streams.result()
        before = time.thread_time()
        effects = streams.core.step(event, streams.now_ns)
        stepped = time.thread_time()
        recorder.record(event, effects, streams.now_ns)
        core_s += stepped - before
        in_loop_s += time.thread_time() - stepped
        streams.note(effects)
        due += 1 / pace_per_s
        time.sleep(max(0.0, due - time.monotonic()))
    _wait_idle(recorder)
    in_thread_s = time.clock_gettime(clock) - in_thread
    recorder.close()
    assert recorder.num_lost == 0
    return Cost(core_s, in_loop_s + in_thread_s, _bytes_in(directory) - head_bytes, snapshot_ms)


def _wait_idle(recorder: Recorder) -> None:
    time.sleep(2 * FLUSH_S)
    while not recorder.is_idle:
        time.sleep(FLUSH_S)


def _bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument("--pace", type=float, default=200.0, help="iterations per second")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    num_iterations = int(options.seconds * options.pace)
    print(f"{'streams':>8} {'core %':>8} {'recorder %':>11} {'MB/min':>8} {'snapshot ms':>12}")
    for num_streams in options.streams:
        costs = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as name:
                costs.append(run(num_streams, num_iterations, options.pace, Path(name)))
        core = 100 * statistics.median(cost.core_s for cost in costs) / options.seconds
        recorder = 100 * statistics.median(cost.recorder_s for cost in costs) / options.seconds
        mb_per_min = statistics.median(cost.num_bytes for cost in costs) * 60 / options.seconds / 1e6
        snapshot_ms = statistics.median(cost.snapshot_ms for cost in costs)
        print(f"{num_streams:8d} {core:8.2f} {recorder:11.2f} {mb_per_min:8.2f} {snapshot_ms:12.1f}")


if __name__ == "__main__":
    main()
