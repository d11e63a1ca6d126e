"""What the operator sets for the core: one value, fixed for its life."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Targets and bounds. Times in nanoseconds, as the core's clock."""

    tbt_target_ns: int
    late_share: float = 0.001  # of the gaps, what may exceed the target
    ring_allowance_ns: int = 0  # of a gap, what the rest of the ring may add to the worker's part
    policy: str = "stall_free"
    depth: int = 2  # plans in flight for each worker, and one more for each stage of a pipeline beyond the first
    max_running: int = 256  # requests on one worker
    max_waiting: int = 1024  # requests in the queue
    queue_timeout_ns: int = 60_000_000_000  # from arrival to the first chunk
    plan_timeout_ns: int = 30_000_000_000  # from a plan's leaving to its result; then the worker counts as lost
    fixed_token_budget: int | None = None  # instead of the one that follows from the target
    max_batched_tokens: int = 8192  # of whole prompts that one iteration takes, in policies that do not chunk
    min_prefill_tokens: int = 16  # of an iteration, even when decodes alone break the target: prompts must get on
    overcommit: float = 1.0  # of a worker's KV cache, what the expected lengths of its requests may add up to
    max_preemptions: int = 3  # of one request; then it runs with all its blocks reserved
    max_losses: int = 3  # workers lost under one request before it fails
    max_refusals: int = 3  # plans refused in a row before a worker is dismissed
    has_prefix_cache: bool = True
