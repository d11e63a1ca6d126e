"""Options of the scheduler."""

from dataclasses import dataclass
from pathlib import Path

from common.config import option
from common.process import ProcessConfig
from services.scheduler.limits import Limits
from services.scheduler.policy import POLICIES

LEAST_RECORDINGS_MB = 16
"""A few snapshots of a large pool must fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ProcessConfig):
    bind: str = option("tcp://127.0.0.1:5600", "inbox that tokenizers and workers dial")
    tbt_target_ms: float = option(100.0, "the longest time between two tokens of a stream that is on time")
    late_share: float = option(0.001, "of the gaps, what may exceed the target")
    ring_allowance_ms: float = option(
        -1.0, "of each gap, what is kept for the way round the ring; below 0: 3% of the target"
    )
    policy: str = option("stall_free", f"what runs next: {', '.join(POLICIES)}")
    depth: int = option(
        2,
        "plans in flight for each worker, and one more for each stage of a pipeline beyond the first: 2 lets the "
        "device go on while the scheduler thinks, or 1",
    )
    token_budget: int = option(0, "tokens an iteration may compute; 0 derives it from the TBT target")
    max_running: int = option(256, "requests that one worker may run at a time")
    max_waiting: int = option(1024, "requests that may wait; more are refused with 429")
    queue_timeout_s: float = option(60.0, "the longest wait for a worker with room; then 503")
    prefix_cache: bool = option(True, "share the KV blocks of equal prefixes")
    overcommit: float = option(1.0, "of a worker's KV cache, what the expected lengths of its requests may add up to")
    fits: Path = option(
        Path("~/.cache/legato/fits"), "folder for what is learned of devices and models, to start from next time"
    )
    plan_timeout_s: float = option(30.0, "a worker that brings no result for so long counts as lost")
    recordings: Path = option(
        Path("~/.cache/legato/recordings"),
        "folder of the flight recorder; it holds token ids, so only this user may read it",
    )
    recordings_mb: int = option(256, "disk space that recordings may take, in MB; the oldest go; 0 records nothing")
    recordings_max_age_h: float = option(72.0, "hours after which a recording is deleted")

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        if self.policy not in POLICIES:
            raise ValueError(f"--policy is {self.policy!r}; known: {', '.join(POLICIES)}")
        if not 1 <= self.depth <= 2:
            raise ValueError(f"--depth is {self.depth}; 1 or 2")
        for name in ("tbt_target_ms", "queue_timeout_s", "plan_timeout_s", "max_running", "max_waiting"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 < self.late_share < 1:
            raise ValueError(f"--late-share is {self.late_share}; it must lie between 0 and 1")
        if self.recordings_mb != 0 and self.recordings_mb < LEAST_RECORDINGS_MB:
            raise ValueError(f"--recordings-mb is {self.recordings_mb}; 0, or at least {LEAST_RECORDINGS_MB}")
        if not self.recordings_max_age_h > 0:
            raise ValueError(f"--recordings-max-age-h is {self.recordings_max_age_h}; it must be above 0")
        if self.token_budget < 0:
            raise ValueError(f"--token-budget is {self.token_budget}; it must be at least 0")

    def limits(self) -> Limits:
        """What of this the core needs."""
        allowance_ms = self.ring_allowance_ms if self.ring_allowance_ms >= 0 else 0.03 * self.tbt_target_ms
        return Limits(
            tbt_target_ns=int(self.tbt_target_ms * 1e6),
            late_share=self.late_share,
            ring_allowance_ns=int(allowance_ms * 1e6),
            policy=self.policy,
            depth=self.depth,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            queue_timeout_ns=int(self.queue_timeout_s * 1e9),
            plan_timeout_ns=int(self.plan_timeout_s * 1e9),
            has_prefix_cache=self.prefix_cache,
            overcommit=self.overcommit,
            fixed_token_budget=self.token_budget or None,
        )
