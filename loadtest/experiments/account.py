"""Does the account hold? Every gap of many streams, as the gateway explains it and as a client measures it.

    python -m loadtest.experiments.account --streams 200 --tokens 100

It starts `legato up --device simulated` with every gap logged as a stall (`--stall-above-ms`), reads that many streams
that arrive over some seconds, and prints: for how many gaps the parts sum to the gateway's gap, to the nanosecond; how
the gaps at the client's socket, by the kernel's time of arrival, differ from the gateway's; what the parts add up to;
and how much later than that the client read them, which no gateway can know.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.clock import NS_PER_MS
from loadtest.experiments.socket_reader import SocketStream, read_streams
from loadtest.experiments.system import running

FIRST_PROMPT_LEN = 32
"""Of the first stream; each further one's is a token longer, which tells them apart in the gateway's log."""
ABOVE_MS = 1e-6
UNLIMITED_LINES = 10**9


@dataclass(slots=True)
class Comparison:
    """Gaps that both have seen."""

    num_gaps: int
    num_exact: int  # whose parts sum to the gateway's gap
    off_ms: "np.ndarray[Any, np.dtype[np.float64]]"  # client's gap less the gateway's
    parts_ms: Counter[str]


def read_all(url: str, options: argparse.Namespace) -> list[SocketStream]:
    """Read all streams, which begin at even distances.

    Raises:
        SystemExit: If one of them fails.
    """
    bodies = [
        json.dumps(
            {
                "model": "smollm2",
                "prompt": [100 + index] * (FIRST_PROMPT_LEN + index),
                "max_tokens": options.tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        for index in range(options.streams)
    ]
    starts_s = [options.ramp_s * index / options.streams for index in range(options.streams)]
    streams = read_streams(url, "/v1/completions", bodies, starts_s)
    if failed := [stream.status for stream in streams if not stream.is_done]:
        raise SystemExit(f"{len(failed)} streams failed: {Counter(failed)}")
    return streams


def compare(streams: Sequence[SocketStream], log: Path, num_tokens: int) -> Comparison:
    """Join what the client read with what the gateway logged."""
    lines = list(_events(log.read_text()))
    index_of = {
        line["request_id"]: line["num_prompt_tokens"] - FIRST_PROMPT_LEN
        for line in lines
        if line["event"] == "request_finished" and line["role"] == "gateway"
    }
    off_ms: list[float] = []
    parts_ms = Counter[str]()
    num_gaps = num_exact = 0
    for line in lines:
        if line["event"] != "stall":
            continue
        parts = line["parts_ms"]
        num_exact += sum(round(part * NS_PER_MS) for part in parts.values()) == round(line["gap_ms"] * NS_PER_MS)
        parts_ms.update(parts)
        num_gaps += 1
        times = streams[index_of[line["request_id"]]].times_ns
        if len(times) != num_tokens:
            continue  # Some token gave no text of its own, so events and tokens cannot be matched.
        token = line["token_index"]
        off_ms.append((times[token] - times[token - 1]) / NS_PER_MS - line["gap_ms"])
    return Comparison(num_gaps, num_exact, np.array(off_ms), parts_ms)


def _events(text: str) -> Iterator[dict[str, Any]]:
    """The log's events. Processes write to one file, so a line may hold two of them."""
    decoder = json.JSONDecoder()
    at = 0
    while (begin := text.find("{", at)) >= 0:
        try:
            event, at = decoder.raw_decode(text, begin)
        except json.JSONDecodeError:
            at = text.find("\n", begin)  # Torn: its gap goes missing from the count, and shows there.
            if at < 0:
                return
        else:
            yield event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--ramp-s", type=float, default=4.0, help="over which streams arrive")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--profile", default="a100-llama2-70b-tp4")
    options = parser.parse_args()
    environ = {"LEGATO_STALL_ABOVE_MS": str(ABOVE_MS), "LEGATO_MAX_STALL_LINES_PER_S": str(UNLIMITED_LINES)}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        flags = ("--device", "simulated", "--profile", options.profile)
        with running(options.port, flags, environ, Path(folder) / "fits", log=log) as system:
            streams = read_all(system.url, options)
        found = compare(streams, log, options.tokens)
    lags_ns = [lag_ns for stream in streams for lag_ns in stream.read_lags_ns]
    print_comparison(found, lags_ns, options.streams * (options.tokens - 1))


def print_comparison(found: Comparison, lags_ns: list[int], num_expected: int) -> None:
    print(f"gaps: {found.num_gaps} accounted for, of {num_expected} between tokens that left one by one or together")
    print(f"parts sum to the gap, to the nanosecond: {found.num_exact}")
    off = np.abs(found.off_ms)
    print(f"client's gap less the gateway's, {len(off)} gaps, ms:", end="")
    for share in (50, 90, 99, 99.9, 100):
        print(f"  P{share:g} {np.percentile(off, share):.3f}", end="")
    lags = np.array(lags_ns) / NS_PER_MS
    print(f"\nread later than it arrived by, ms:  P50 {np.percentile(lags, 50):.3f}", end="")
    print(f"  P99 {np.percentile(lags, 99):.3f}  P100 {lags.max():.3f}")
    total_ms = sum(found.parts_ms.values())
    print("parts, share of all gaps:", end="")
    print("".join(f"  {name} {100 * part_ms / total_ms:.1f}%" for name, part_ms in found.parts_ms.most_common()))


if __name__ == "__main__":
    main()
