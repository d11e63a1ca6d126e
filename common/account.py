"""The account of a gap between two tokens of a stream: the parts that sum to it, and the one that made it a stall.

Source: DESIGN of the account in docs/stalls.md. Integer nanoseconds; pure arithmetic.
"""

from dataclasses import dataclass
from enum import StrEnum

from common.messages.gaps import WorkerGap


class Cause(StrEnum):
    """Why a gap was longer than its stream's target. Names of metrics, logs and traces; they do not change."""

    PREFILL_INTERFERENCE = "prefill_interference"  # prompts were computed in iterations of the gap
    PREEMPTION = "preemption"  # the stream lost its KV blocks, and was computed again
    KV_WAIT = "kv_wait"  # no KV block was free for its next token
    PLAN_WAIT = "plan_wait"  # the worker waited for a plan
    WORKER_LOST = "worker_lost"  # its worker, or a process on the way to it, was lost
    SCHEDULER_LAG = "scheduler_lag"  # from the worker until the scheduler had passed the token on
    DETOKENIZER_LAG = "detokenizer_lag"  # from there until the tokenizer had passed its text on
    GATEWAY_LAG = "gateway_lag"  # from there until it was written to the client's connection
    SLOW_CLIENT = "slow_client"  # the client's connection was full
    DEVICE_SLOW = "device_slow"  # iterations took longer than predicted
    OVER_CAPACITY = "over_capacity"  # decodes alone take longer than the target, or took turns
    HELD_TEXT = "held_text"  # tokens came in time, but gave no text: by design, and not counted as a stall


@dataclass(frozen=True, slots=True, kw_only=True)
class GapAccount:
    """A gap at the client's connection, as a sum. Parts of hops are negative where a hop caught up."""

    worker: WorkerGap
    scheduler_lag_ns: int
    detokenizer_lag_ns: int
    gateway_lag_ns: int
    slow_client_ns: int

    @property
    def total_ns(self) -> int:
        """The gap."""
        return sum(self._all_parts().values())

    def parts(self) -> dict[str, int]:
        """Every part that is not 0, in nanoseconds, in the order in which they arose; they sum to the gap."""
        return {name: part_ns for name, part_ns in self._all_parts().items() if part_ns}

    def cause(self, target_ns: int) -> Cause:
        """What made this gap a stall of a stream with this target.

        The work of decoding itself is no fault unless it leaves no way to keep the target. Of all else the largest
        part is the cause; of equal ones, the one nearest to the device.
        """
        parts = self._all_parts()
        if parts.pop("decode") > target_ns:
            return Cause.OVER_CAPACITY
        largest = max(parts, key=parts.__getitem__)
        return Cause.OVER_CAPACITY if largest == "not_scheduled" else Cause(largest)

    def _all_parts(self) -> dict[str, int]:
        """By name: a cause's, but for decode and not_scheduled."""
        worker = self.worker
        return {
            "decode": worker.decode_ns,
            "prefill_interference": worker.prefill_interference_ns,
            "not_scheduled": worker.not_scheduled_ns,
            "preemption": worker.preemption_ns,
            "kv_wait": worker.kv_wait_ns,
            "plan_wait": worker.plan_wait_ns,
            "worker_lost": worker.worker_lost_ns,
            "device_slow": worker.device_slow_ns,
            "scheduler_lag": self.scheduler_lag_ns,
            "detokenizer_lag": self.detokenizer_lag_ns,
            "gateway_lag": self.gateway_lag_ns,
            "slow_client": self.slow_client_ns,
        }
