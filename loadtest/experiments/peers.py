"""Other servers beside ours, by turns, in one run: `python -m loadtest.experiments.peers --peers FILE`.

FILE is TOML and says how each peer is started; `legato up` always takes part, and need not be named:

    [[peer]]
    name = "llama.cpp bf16"
    command = "$PEERS/llama-server -m $PEERS/smollm2-bf16.gguf --host 127.0.0.1 --port 8102 -np 8 -c 32768 -t 2"
    port = 8102

`model` is the name that its API wants, if not the first of /v1/models; variables of the environment are put in. Each
server starts anew for its turn and has the machine to itself. Four measures, by `legato load`: one stream; eight; four
streams while long prompts come; the prefill of long prompts alone. Beside them: time to start, and resident memory.
Writes Markdown, and JSON beside it. Ratios are above 1 where Legato is ahead.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.experiments.cpu_target import cpu_name
from loadtest.experiments.peer_servers import Peer, PeerBroken, busy_cores, legato, memory_bytes, read_peers, running

STEADY_STREAMS = 4
PROMPT_LEN = 128
OUTPUT_LEN = 128
LOAD_TIMEOUT_S = 900.0
"""Of one measure; the slowest peer known takes two minutes."""
MAX_BUSY_CORES = 0.15
"""Of other processes, on a machine that may be called quiet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What one server's turn brought."""

    start_s: float  # until /v1/models answers
    memory_mb: float  # of all its processes, shared pages counted once, after the load
    one_stream_tok_s: float  # decoding alone: 1 / median TPOT
    eight_streams_tok_s: float  # output tokens, prefill included
    prefill_tok_s: float  # a long prompt's tokens / the median TTFT of a few, each alone
    gap_p999_ms: float  # of the four streams, while a long prompt is read
    gap_max_ms: float
    late_share: float  # of those gaps, above the target
    prompt_ttft_s: float  # of the long prompts beside them, median
    errors: int


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table: how it is written, and what Legato's advantage is."""

    title: str
    text: Callable[[Measures], str]
    value: Callable[[Measures], float]
    is_more_better: bool

    def ratio(self, ours: Measures, theirs: Measures) -> float:
        """Above 1 where ours is better."""
        better, worse = (ours, theirs) if self.is_more_better else (theirs, ours)
        return self.value(better) / self.value(worse) if self.value(worse) else float("inf")


FIGURES = (
    Figure("one stream, tokens/s", lambda it: f"{it.one_stream_tok_s:.1f}", lambda it: it.one_stream_tok_s, True),
    Figure("eight, tokens/s", lambda it: f"{it.eight_streams_tok_s:.0f}", lambda it: it.eight_streams_tok_s, True),
    Figure("prefill, tokens/s", lambda it: f"{it.prefill_tok_s:.0f}", lambda it: it.prefill_tok_s, True),
    Figure("four beside prompts: P99.9 gap, ms", lambda it: f"{it.gap_p999_ms:.0f}", lambda it: it.gap_p999_ms, False),
    Figure("largest gap, ms", lambda it: f"{it.gap_max_ms:.0f}", lambda it: it.gap_max_ms, False),
    Figure("prompts' TTFT, s", lambda it: f"{it.prompt_ttft_s:.2f}", lambda it: it.prompt_ttft_s, False),
    Figure("start, s", lambda it: f"{it.start_s:.1f}", lambda it: it.start_s, False),
    Figure("memory, MB", lambda it: f"{it.memory_mb:.0f}", lambda it: it.memory_mb, False),
)


def main() -> int:
    options = _parsed()
    try:
        peers = read_peers(options.peers) if options.peers else []
    except (OSError, ValueError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    busy = busy_cores()
    if busy > MAX_BUSY_CORES:
        print(f"peers: other processes use {busy:.2f} cores; figures of a busy machine mean little", file=sys.stderr)
        if not options.busy_ok:
            print("peers: stop them, or say --busy-ok", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory() as fits:
        servers = [legato(options.tbt_target_ms, options.flags, fits), *peers]
        turns, broken = take_turns(servers, options)
    if servers[0].name in broken:
        return 1
    found = {name: medians(measured) for name, measured in turns.items() if name not in broken}
    document = as_document(found, busy, options)
    document += "".join(f"\nNot measured: {detail}.\n" for detail in broken.values())
    print(document)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(document)
        content = {name: [asdict(it) for it in measured] for name, measured in turns.items()}
        options.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


def take_turns(
    servers: Sequence[Peer], options: argparse.Namespace
) -> tuple[dict[str, list[Measures]], dict[str, str]]:
    """Measure each server once a round; also why those that broke have no more turns. Without ours, nobody has."""
    turns: dict[str, list[Measures]] = {server.name: [] for server in servers}
    broken: dict[str, str] = {}
    for number in range(options.rounds):
        for server in servers:
            if server.name in broken:
                continue
            print(f"round {number + 1}: {server.name}", file=sys.stderr, flush=True)
            try:
                turns[server.name].append(measure(server, options))
            except PeerBroken as error:
                print(f"peers: {error}", file=sys.stderr, flush=True)
                broken[server.name] = str(error)
                if server is servers[0]:
                    return turns, broken
            else:
                print(turns[server.name][-1], file=sys.stderr, flush=True)
    return turns, broken


def measure(server: Peer, options: argparse.Namespace) -> Measures:
    """Start a server, take all measures, and stop it.

    Raises:
        PeerBroken: If it does not start, or a measure brings no figures.
    """
    with running(server) as (process, start_s):
        load = Load(server, options.tokenizer)
        load.run(users=1, requests=2, prompt_len=PROMPT_LEN, output_len=16)  # Warm, and learning is over.
        one = load.run(users=1, requests=3, prompt_len=PROMPT_LEN, output_len=OUTPUT_LEN)
        eight = load.run(users=8, requests=24, prompt_len=PROMPT_LEN, output_len=OUTPUT_LEN)
        prefill = load.run(users=1, requests=4, prompt_len=options.prompt_len, output_len=1)
        beside = load.stall(options)
        during = beside["gap_ms"]["during"]
        return Measures(
            start_s=start_s,
            memory_mb=memory_bytes(process.pid) / 1e6,
            one_stream_tok_s=1000 / one["tpot_ms"]["p50"],
            eight_streams_tok_s=eight["throughput_tok_s"],
            prefill_tok_s=1000 * options.prompt_len / prefill["ttft_ms"]["p50"],
            gap_p999_ms=during["p999"],
            gap_max_ms=during["max"],
            late_share=beside["stalls"]["during"] / beside["gaps"]["during"],
            prompt_ttft_s=beside["injected_ttft_ms"]["p50"] / 1000,
            errors=sum(it["errors"] for it in (one, eight, prefill, beside)),
        )


class Load:
    """`legato load` against one server, as processes of its own: ours must not share their event loop's lags."""

    def __init__(self, server: Peer, tokenizer: Path | None) -> None:
        self._server = server
        self._shared = ["--base-url", server.url, *(("--model", server.model) if server.model else ())]
        self._shared += ["--tokenizer", str(tokenizer)] if tokenizer else []

    def run(self, *, users: int, requests: int, prompt_len: int, output_len: int) -> Any:
        """`legato load run` with users that wait for their answers; its report."""
        flags = ["--arrivals", "closed", "--users", str(users), "--requests", str(requests), "--startup-s", "0.5"]
        flags += ["--prompt-len", str(prompt_len), "--output-len", str(output_len), "--progress", "false"]
        return self._report("run", [*flags, "--seed", str(prompt_len * requests + users)], "tpot_ms")

    def stall(self, options: argparse.Namespace) -> Any:
        """`legato load stall`: four streams, and long prompts beside them; its report."""
        flags = ["--streams", str(STEADY_STREAMS), "--output-len", "400", "--tbt-target-ms", str(options.tbt_target_ms)]
        flags += ["--inject-prompt-len", str(options.prompt_len), "--injections", str(options.injections)]
        flags += ["--every-s", str(options.every_s), "--before-s", "3", "--after-s", "1"]
        return self._report("stall", flags, "gap_ms")

    def _report(self, command: str, flags: Sequence[str], needed: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "report.json"
            argv = [sys.executable, "-m", "loadtest", command, *self._shared, *flags, "--json", str(file)]
            try:
                done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S)
                report = json.loads(file.read_text())
            except subprocess.TimeoutExpired as error:
                raise PeerBroken(f"{self._server.name}: load {command} took over {LOAD_TIMEOUT_S:g} s") from error
            except FileNotFoundError as error:
                raise PeerBroken(f"{self._server.name}: {done.stderr.strip()[-300:]}") from error
        if needed not in report or report["errors"]:
            raise PeerBroken(f"{self._server.name}: load {command} met {report['errors']} errors")
        return report


def medians(measured: Sequence[Measures]) -> Measures:
    """Of each figure over the rounds."""
    return Measures(**{name: median(asdict(it)[name] for it in measured) for name in asdict(measured[0])})


def as_document(found: dict[str, Measures], busy: float, options: argparse.Namespace) -> str:
    """The table, with what a reader needs to repeat it."""
    ours, *others = found
    rounds = "one round" if options.rounds == 1 else f"medians of {options.rounds} rounds"
    lines = [
        "# Beside other servers",
        "",
        f"{datetime.date.today()}, {cpu_name()}, {os.cpu_count()} cores; other processes used {busy:.2f} cores at the "
        f"start. SmolLM2-135M-Instruct; {rounds} by turns. One and eight streams: prompts of "
        f"{PROMPT_LEN} tokens, answers of {OUTPUT_LEN}. Four streams decode while {options.injections} prompts of "
        f"{options.prompt_len} tokens come, one every {options.every_s:g} s; Legato's TBT target is "
        f"{options.tbt_target_ms:g} ms. In brackets: Legato's advantage, above 1 where it is ahead.",
        "",
        "```",
        'make bench-peers ARGS="' + " ".join(sys.argv[1:]) + '"',
        "```",
        "",
        "| | " + " | ".join(found) + " |",
        "| --- |" + " --- |" * len(found),
    ]
    for figure in FIGURES:
        cells = [figure.text(found[ours])]
        cells += [f"{figure.text(found[name])} ({figure.ratio(found[ours], found[name]):.2f})" for name in others]
        lines.append(f"| {figure.title} | " + " | ".join(cells) + " |")
    lines.append("| gaps above the target | " + " | ".join(f"{it.late_share:.1%}" for it in found.values()) + " |")
    return "\n".join(lines) + "\n"


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.experiments.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peers", type=Path, help="TOML file of peers; without one, Legato is measured alone")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tbt-target-ms", type=float, default=60.0)
    parser.add_argument("--prompt-len", type=int, default=1500)
    parser.add_argument("--injections", type=int, default=6)
    parser.add_argument("--every-s", type=float, default=3.0)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, for prompts of exact length on every server")
    parser.add_argument("--busy-ok", action="store_true", help="measure although other processes are busy")
    parser.add_argument("--output", type=Path, help="write the table here, and all turns as JSON beside it")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags for `legato up`, last")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
