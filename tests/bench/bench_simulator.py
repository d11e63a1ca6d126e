"""How long a simulated iteration takes: the core's step, its world, and the figures that are kept of it.

    python -m tests.bench.bench_simulator

One core serves one worker under arrivals at the rate that makes batches of some 32 rows in the mean (sharegpt lengths,
Mistral-7B on one A100-80, a target of 100 ms). CPU time of this process, building the world aside; the least of some
rounds, since whatever else a machine does only adds to it. A million iterations in five minutes are 300 µs each.
"""

import argparse
import time

from common.process import tune_garbage_collector
from loadtest.simulate.options import SimulateOptions
from loadtest.simulate.setup import world_of
from loadtest.simulate.simulation import Simulation

RATE_RPS = 2.3
"""Arrivals that give the batch of the claim."""


def measure(num_requests: int, *, has_prefix_cache: bool) -> tuple[float, float, int]:
    """Microseconds of an iteration, rows of the mean batch, and how many iterations that was."""
    options = SimulateOptions(rate=RATE_RPS, requests=num_requests, prefix_cache=has_prefix_cache)
    simulation = Simulation(world_of(options, seed=0))
    began = time.process_time()
    outcome = simulation.run()
    took_s = time.process_time() - began
    return 1e6 * took_s / outcome.num_iterations, outcome.batch.mean() or 0.0, outcome.num_iterations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="of each round")
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    flags = parser.parse_args()
    tune_garbage_collector()
    print(f"{'prefix cache':>12} {'iterations':>10} {'mean batch':>10} {'us/iteration':>12} {'1e6 take':>10}")
    for has_prefix_cache in (False, True):
        rounds = [measure(flags.requests, has_prefix_cache=has_prefix_cache) for _ in range(flags.rounds)]
        us, mean_batch, num_iterations = min(rounds)
        name = "on" if has_prefix_cache else "off"
        print(f"{name:>12} {num_iterations:10d} {mean_batch:10.1f} {us:12.1f} {us / 60:6.1f} min")


if __name__ == "__main__":
    main()
