"""How long the scheduler core takes to decide: `python -m tests.bench.bench_step`.

Prints, for growing numbers of streams on one worker, the median time of a `step` that takes an iteration's result in
(appending every token, checking every end) and plans the next. Not a test: it asserts nothing.
"""

import argparse
import statistics
import time

from common.process import tune_garbage_collector
from tests.bench.streams import Streams


def measure(num_streams: int, prompt_len: int, num_iterations: int) -> tuple[float, float]:
    """Median milliseconds of a whole step, and of one with a prefill chunk to solve for beside the streams."""
    tune_garbage_collector()
    streams = Streams(num_streams, prompt_len)

    def finish() -> float:
        event = streams.result()
        began = time.process_time()
        effects = streams.core.step(event, streams.now_ns)
        took_ms = 1e3 * (time.process_time() - began)
        streams.note(effects)
        return took_ms

    steady = statistics.median(finish() for _ in range(num_iterations))
    streams.arrive("long", 60_000)
    hybrid = []
    for _ in range(num_iterations):
        assert streams.plan is not None
        if streams.plan.chunks:
            hybrid.append(finish())
        else:
            finish()
    return steady, statistics.median(hybrid) if hybrid else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=300)
    options = parser.parse_args()
    print(f"{'streams':>8} {'steady ms':>10} {'us/stream':>10} {'hybrid ms':>10}")
    for num_streams in options.streams:
        steady, hybrid = measure(num_streams, options.prompt_len, options.iterations)
        print(f"{num_streams:8d} {steady:10.3f} {1e3 * steady / num_streams:10.2f} {hybrid:10.3f}")


if __name__ == "__main__":
    main()
