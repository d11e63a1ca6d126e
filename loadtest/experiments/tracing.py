"""What traces cost: two systems side by side, one of which exports spans of a tenth of its requests.

    python -m loadtest.experiments.tracing --streams 32 --rounds 4 --seconds 12

Both are up all the time, with simulated workers; closed loops of that many streams load them in turns, so that what the
machine does meanwhile falls on both. Spans go to a sink in a process of its own, which reads and forgets them.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import numpy as np

from common.clock import NS_PER_MS
from loadtest.drive import Outcome
from loadtest.experiments.system import COMMANDS, RunningSystem, running
from loadtest.options import LoadOptions
from loadtest.single import run_here
from loadtest.summary import reasons_against

PROFILE = "a100-mistral-7b"
PROMPT_LEN = 64
OUTPUT_LEN = 128


class _Sink(BaseHTTPRequestHandler):
    """Answers as a collector does that has taken everything."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


async def load(system: RunningSystem, options: argparse.Namespace, seed: int) -> Outcome:
    """One round of one system."""
    outcome, _, _ = await run_here(
        LoadOptions(
            base_url=system.url,
            arrivals="closed",
            users=options.streams,
            duration=options.seconds,
            prompt_len=str(PROMPT_LEN),
            output_len=str(OUTPUT_LEN),
            startup_s=2.0,
            drain_s=10.0,
            seed=seed,
        )
    )
    if reasons := reasons_against(outcome):
        print(f"a round that counts for little: {'; '.join(reasons)}", file=sys.stderr)
    return outcome


def figures(outcomes: Sequence[Outcome]) -> tuple[float, float, float]:
    """Tokens a second, and the gaps' P50 and P99 in milliseconds, of a system's rounds together."""
    num_tokens, window_s, gaps_ns = 0, 0.0, list[int]()
    for outcome in outcomes:
        window_s += (outcome.window_end_ns - outcome.window_start_ns) / 1e9
        for record in outcome.records:
            inside = [at_ns for at_ns in record.chunk_ns if outcome.window_start_ns <= at_ns < outcome.window_end_ns]
            num_tokens += len(inside)
            gaps_ns += [later - earlier for earlier, later in pairwise(inside)]
    p50, p99 = np.percentile(np.array(gaps_ns), (50, 99)) / NS_PER_MS
    return num_tokens / window_s, float(p50), float(p99)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--share", type=float, default=0.1, help="of the requests, how many are traced")
    parser.add_argument("--port", type=int, default=8124, help="the first of three")
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sink:
        ThreadingHTTPServer(("127.0.0.1", options.port), _Sink).serve_forever()
    sink = subprocess.Popen(
        [sys.executable, "-m", "loadtest.experiments.tracing", "--sink", "--port", str(options.port + 2)]
    )
    flags = ("--device", "simulated", "--profile", PROFILE)
    environ = {
        "LEGATO_OTLP_ENDPOINT": f"http://127.0.0.1:{options.port + 2}",
        "LEGATO_TRACE_SHARE": str(options.share),
    }
    found: dict[str, list[Outcome]] = {"off": [], "on": []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            fits = Path(folder)
            with (
                running(options.port, flags, {}, fits / "off") as off,
                running(options.port + 1, flags, environ, fits / "on") as on,
            ):
                for index in range(options.rounds):
                    turns = [("off", off), ("on", on)]
                    for name, system in turns if index % 2 == 0 else reversed(turns):
                        found[name].append(asyncio.run(load(system, options, index)))
                exported = sum(on.metric(role, "legato_spans_exported_total").get("", 0.0) for role in COMMANDS)
                dropped = sum(on.metric(role, "legato_spans_dropped_total").get("", 0.0) for role in COMMANDS)
    finally:
        sink.terminate()
        sink.wait()
    print("| traces | tokens/s | TBT P50 ms | TBT P99 ms |\n| --- | --- | --- | --- |")
    rates = {}
    for name, outcomes in found.items():
        rates[name], p50, p99 = figures(outcomes)
        print(f"| {name} | {rates[name]:.0f} | {p50:.3f} | {p99:.3f} |")
    print(
        f"throughput on / off: {rates['on'] / rates['off']:.4f}; spans exported {exported:.0f}, dropped {dropped:.0f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
