"""Do our figures agree with those of other load generators?

    python -m loadtest.experiments.agreement --aiperf VENV/bin/aiperf --guidellm VENV/bin/guidellm --out docs/results

Each tool is installed in an environment of its own (`pip install aiperf`, `pip install guidellm`), outside this
repository. It runs side by side with `legato load run`, at the same time against the same system, whose worker is
simulated: both see the same iterations, each on requests of its own. (guidellm runs by turns with ours; see there.)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.models import find_model
from loadtest.experiments.system import RunningSystem, running
from services.tokenizer.text.loading import load_tokenizer

PROMPT_LEN, OUTPUT_LEN = 128, 64
SETTLE_S = 3.0
"""Requests that began in a tool's first seconds are left out: its own connections and caches were cold."""
BOUND_PERCENT = 5.0
QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
TOOL_TIMEOUT_S = 600.0
POLL_S = 0.1
ANY_REVISION = "0" * 40
CACHED_NAME = "legato/smollm2"


@dataclass(frozen=True, slots=True)
class Peer:
    """Another tool, and how to drive both alike."""

    name: str
    command: list[str]
    own_flags: list[str]  # of `legato load run`, for the same arrivals
    environ: dict[str, str]
    read: Callable[[], dict[str, list[float]]]
    is_alone: bool = False  # by turns: users of two closed loops would fall into step with each other, each in its own


def main(argv: Sequence[str] | None = None) -> int:
    """Compare with every tool that was named; 0 if P50 and P90 agree, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.experiments.agreement")
    parser.add_argument("--aiperf", type=Path, help="aiperf's command")
    parser.add_argument("--guidellm", type=Path, help="guidellm's command")
    parser.add_argument("--requests", type=int, default=300, help="of each tool")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second of each tool, where it has one")
    parser.add_argument("--users", type=int, default=8, help="of each tool, where it is driven closed")
    parser.add_argument("--port", type=int, default=8660)
    parser.add_argument("--out", type=Path, help="folder for load-agreement.json")
    flags = parser.parse_args(argv)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        save_tokenizer(scratch)
        with running(
            flags.port, ["--device", "simulated", "--profile", "a100-mistral-7b"], {}, scratch / "fits"
        ) as system:
            if flags.aiperf is not None:
                found["aiperf"] = compare(_aiperf(flags, system, scratch), system, flags.requests, scratch)
            if flags.guidellm is not None:
                found["guidellm"] = compare(_guidellm(flags, system, scratch), system, flags.requests, scratch)
    print(_as_markdown(found))
    if flags.out is not None:
        (flags.out / "load-agreement.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    rows = [row for tool in found.values() for row in tool["rows"] if row["quantile"] != "p99"]
    return 0 if all(abs(row["difference_percent"]) <= BOUND_PERCENT for row in rows) else 1


def save_tokenizer(scratch: Path) -> None:
    """Leave SmolLM2's tokenizer where transformers looks without a network: as a folder, and as a cached download
    (aiperf takes no folder when it is offline)."""
    files = load_tokenizer(find_model("smollm2"))
    cached = scratch / "hub" / f"models--{CACHED_NAME.replace('/', '--')}"
    for folder in (scratch / "tokenizer", cached / "snapshots" / ANY_REVISION):
        folder.mkdir(parents=True)
        files.tokenizer.save(str(folder / "tokenizer.json"))
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192, **files.named_tokens}
        (folder / "tokenizer_config.json").write_text(json.dumps(described))
        (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(ANY_REVISION)


def compare(peer: Peer, system: RunningSystem, num_requests: int, scratch: Path) -> dict[str, Any]:
    """Run both tools at once, and lay their figures side by side."""
    report = scratch / f"legato-{peer.name}.json"
    num_before = _num_tokens(system)
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **peer.environ}
    log_path = scratch / f"{peer.name}.log"
    with log_path.open("w") as log:
        theirs = subprocess.Popen(peer.command, env=environ, stdout=log, stderr=subprocess.STDOUT)
    try:
        # It takes seconds to load; ours begins when it has begun to send, or has ended.
        while theirs.poll() is None and (peer.is_alone or _num_tokens(system) == num_before):
            time.sleep(POLL_S)
        ours = [sys.executable, "-m", "loadtest", "run", "--base-url", system.url, "--requests", str(num_requests)]
        ours += ["--prompt-len", str(PROMPT_LEN), "--output-len", str(OUTPUT_LEN), "--startup-s", str(SETTLE_S)]
        ours += ["--drain-s", "0", "--progress", "false", "--json", str(report), *peer.own_flags]
        own_status = subprocess.run(ours, timeout=TOOL_TIMEOUT_S, check=False, stdout=subprocess.DEVNULL).returncode
        if (status := theirs.wait(TOOL_TIMEOUT_S)) != 0:
            raise SystemExit(f"{peer.name} ended with {status}:\n{log_path.read_text()[-3000:]}")
    finally:
        theirs.kill()
        theirs.wait()
    own = json.loads(report.read_text())
    rows = []
    for metric, values in peer.read().items():
        group = own["detail"] if metric in own["detail"] else own
        for quantile, percent in QUANTILES.items():
            their_ms, own_ms = float(np.percentile(values, percent)), float(group[metric][quantile])
            rows.append(
                {
                    "metric": metric,
                    "quantile": quantile,
                    "theirs_ms": round(their_ms, 2),
                    "ours_ms": round(own_ms, 2),
                    "difference_percent": round(100 * (own_ms / their_ms - 1), 1),
                }
            )
    return {"command": [Path(peer.command[0]).name, *peer.command[1:]], "valid": own_status == 0, "rows": rows}


def _aiperf(flags: argparse.Namespace, system: RunningSystem, scratch: Path) -> Peer:
    folder = scratch / "aiperf"
    command = [str(flags.aiperf), "profile", "-m", "smollm2", "--url", system.url, "--endpoint-type", "completions"]
    command += ["--streaming", "--request-rate", str(flags.rate), "--request-rate-mode", "poisson"]
    command += ["--request-count", str(flags.requests), "--warmup-request-count", "8"]
    command += ["--synthetic-input-tokens-mean", str(PROMPT_LEN), "--output-tokens-mean", str(OUTPUT_LEN)]
    command += ["--extra-inputs", "ignore_eos:true", "--tokenizer", CACHED_NAME, "--ui", "none"]
    command += ["--artifact-dir", str(folder)]

    def read() -> dict[str, list[float]]:
        lines = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]
        lines = [line for line in lines if line["metadata"]["benchmark_phase"] == "profiling"]
        begun_ns = min(line["metadata"]["request_start_ns"] for line in lines)
        metrics = [
            line["metrics"] for line in lines if line["metadata"]["request_start_ns"] > begun_ns + SETTLE_S * 1e9
        ]
        return {
            "ttft_ms": [one["time_to_first_token"]["value"] for one in metrics],
            "chunk_gap_ms": [gap for one in metrics for gap in one["inter_chunk_latency"]["value"]],
            "tpot_ms": [one["inter_token_latency"]["value"] for one in metrics],
            "e2e_ms": [one["request_latency"]["value"] for one in metrics],
        }

    return Peer("aiperf", command, ["--rate", str(flags.rate)], {"HF_HUB_CACHE": str(scratch / "hub")}, read)


def _guidellm(flags: argparse.Namespace, system: RunningSystem, scratch: Path) -> Peer:
    report = scratch / "guidellm.json"
    backend = f"kind=openai_http,target={system.url},model=smollm2,request_format=/v1/completions"
    command = [str(flags.guidellm), "run", "--backend", f"{backend},validate_backend=false"]
    # Closed: its open arrivals count from before it has loaded, and what is due by then comes in one burst.
    command += ["--profile", f"kind=concurrent,streams={flags.users}"]
    command += ["--constraint", f"kind=max_requests,count={flags.requests}"]
    command += ["--tokenizer", f"kind=hf_auto,model={scratch / 'tokenizer'}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_LEN},output_tokens={OUTPUT_LEN}"]
    command += ["--output", f"kind=json,path={report}", "--disable-console-interactive"]

    def read() -> dict[str, list[float]]:
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        requests = benchmark["requests"]["successful"]
        begun_s = min(one["request_start_time"] for one in requests)
        settled = [one for one in requests if one["request_start_time"] > begun_s + SETTLE_S]
        return {
            "ttft_ms": [one["time_to_first_token_ms"] for one in settled],
            "tpot_ms": [one["inter_token_latency_ms"] for one in settled],
            "e2e_ms": [1e3 * one["request_latency"] for one in settled],
        }

    own_flags = ["--arrivals", "closed", "--users", str(flags.users)]
    return Peer("guidellm", command, own_flags, {}, read, is_alone=True)


def _num_tokens(system: RunningSystem) -> float:
    with urllib.request.urlopen(f"{system.url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("legato_gateway_tokens_total "))


def _as_markdown(found: dict[str, Any]) -> str:
    lines = ["| tool | figure | quantile | theirs ms | ours ms | difference |", "| --- | --- | --- | --- | --- | --- |"]
    for name, tool in found.items():
        for row in tool["rows"]:
            lines.append(
                f"| {name} | {row['metric'].removesuffix('_ms')} | {row['quantile']} | {row['theirs_ms']} | "
                f"{row['ours_ms']} | {row['difference_percent']:+.1f}% |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
