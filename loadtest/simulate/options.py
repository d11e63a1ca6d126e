"""Options of `legato simulate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.config import option
from loadtest.simulate.requests import ArrivalKind
from services.scheduler.policy import POLICIES

MAX_SEEDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """One simulated system and its load."""

    device: str = option("a100-80", "a100-80, h100, h200, cpu, or a JSON file with a worker's saved fit")
    model: str = option(
        "",
        "mistral-7b (the default), yi-34b, llama2-70b, falcon-180b, or a Hugging Face config.json; a fit has its own",
    )
    tp: int = option(1, "devices that share each layer")
    pp: int = option(1, "stages of a pipeline, each tp devices")
    truth: Literal["roofline", "tables"] = option("roofline", "how long iterations really take: see docs/simulator.md")
    profiles: Path | None = option(None, "folder with measured kernel tables, for --truth tables; else generated ones")
    noise: float | None = option(None, "0.2 makes each iteration up to 20% longer or shorter; of a saved fit, its own")
    slowdown_at: float | None = option(None, "seconds after which devices are slower")
    slowdown: float = option(1.3, "by how much, with --slowdown-at")
    ring_delay_ms: float = option(0.0, "one way between scheduler and worker")
    workers: int = option(1, "workers behind one queue")
    kv_tokens: int = option(0, "tokens that a worker's KV cache holds; 0: 90% of its memory, less the weights")
    block_size: int = option(16, "tokens per KV block")
    policy: str = option("stall_free", f"what runs next: {', '.join(POLICIES)}")
    tbt_target_ms: float = option(100.0, "a gap between tokens above this is a stall; the token budget follows from it")
    token_budget: int = option(0, "tokens an iteration may compute, instead of the budget from the target")
    late_share: float = option(0.001, "of the gaps, what may exceed the target")
    ring_allowance_ms: float = option(0.0, "of each gap, what the scheduler keeps for the way round the ring")
    depth: int = option(0, "plans in flight, and one more for each stage beyond the first; 0: 2")
    max_running: int = option(256, "requests that one worker may run at a time")
    max_waiting: int = option(1024, "requests that may wait; more are refused")
    queue_timeout_s: float = option(60.0, "the longest wait for a worker with room")
    max_batched_tokens: int = option(8192, "tokens of whole prompts in one iteration, for policies that do not chunk")
    max_chunk_tokens: int = option(16384, "tokens that a worker computes in one iteration, at most")
    overcommit: float = option(1.0, "of a worker's KV cache, what the expected lengths of its requests may add up to")
    prefix_cache: bool = option(False, "look for prefixes, which takes time; prompts of the simulator share none")
    workload: str = option("sharegpt", "sharegpt, arxiv, a CSV trace, or a built-in one such as azure_2023_conv")
    traces: Path | None = option(None, "folder with the traces of sharegpt and arxiv; else their lengths are drawn")
    arrivals: ArrivalKind = option("poisson", "when requests arrive; trace: as a CSV trace has it")
    burstiness: float = option(4.0, "of bursty arrivals: squared coefficient of variation")
    rate: float | None = option(None, "requests per second (1, or that of the replayed trace)")
    requests: int = option(1000, "requests to simulate")
    warmup_share: float = option(0.0, "of the requests, how many at the start load the system and are not counted")
    max_tokens: int = option(0, "output that requests declare, while an end of sequence ends them; 0: exactly theirs")
    seed: tuple[int, ...] = option((0,), "of all that is random; several run in parallel processes")
    processes: int = option(0, "of several seeds: how many at a time; 0: one per processor")

    @property
    def num_warmup(self) -> int:
        """Requests that are not counted."""
        return int(self.warmup_share * self.requests)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"--policy is {self.policy!r}; known: {', '.join(POLICIES)}")
        for name in ("traces", "profiles"):
            folder = getattr(self, name)
            if folder is not None and not folder.is_dir():
                raise ValueError(f"--{name} is {folder}; there is no such folder")
        above_zero = (
            *("tp", "pp", "slowdown", "workers", "block_size", "tbt_target_ms", "max_running", "max_waiting"),
            *("queue_timeout_s", "max_batched_tokens", "max_chunk_tokens", "overcommit", "burstiness", "requests"),
        )
        for name in above_zero:
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")
        for name in (
            "ring_delay_ms",
            "ring_allowance_ms",
            "kv_tokens",
            "token_budget",
            "depth",
            "max_tokens",
            "processes",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must not be negative")
        if self.max_chunk_tokens < self.max_running:
            # An iteration must have room for a decode of every running request.
            raise ValueError(
                f"--max-chunk-tokens is {self.max_chunk_tokens}, less than --max-running, {self.max_running}"
            )
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ValueError(f"--rate is {self.rate}; it must be above 0")
        if self.noise is not None and not 0 <= self.noise < 1:
            raise ValueError(f"--noise is {self.noise}; it lies between 0 and 1")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"--warmup-share is {self.warmup_share}; it lies between 0 and 1")
        if not 0 < self.late_share < 1:
            raise ValueError(f"--late-share is {self.late_share}; it must lie between 0 and 1")
        if not 1 <= len(self.seed) <= MAX_SEEDS or len(set(self.seed)) != len(self.seed):
            raise ValueError(f"--seed is {self.seed}; from 1 to {MAX_SEEDS} different ones")
