"""What came of a simulated run: distributions, counts and means, in memory that does not grow with the run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.ids import RequestId
from common.messages.streams import StreamBatch
from loadtest.simulate.sketch import Sketch


class Outcome(msgspec.Struct, kw_only=True):
    """All figures of one run, or of several taken together. Times in nanoseconds of the virtual clock."""

    seeds: list[int] = msgspec.field(default_factory=list)
    ttft: Sketch = msgspec.field(default_factory=Sketch)
    tbt: Sketch = msgspec.field(default_factory=Sketch)
    max_gap: Sketch = msgspec.field(default_factory=Sketch)  # of each stream that had a gap
    scheduling_delay: Sketch = msgspec.field(default_factory=Sketch)  # from arrival to the first chunk's plan
    batch: Sketch = msgspec.field(default_factory=Sketch)  # rows of each iteration
    targets_ns: list[int] = msgspec.field(default_factory=list)
    num_late: list[int] = msgspec.field(default_factory=list)  # gaps above each target
    num_arrived: int = 0
    num_finished: int = 0
    num_rejected: int = 0
    num_preemptions: int = 0
    num_output_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_iterations: int = 0
    num_bound: int = 0  # iterations that a stream's deadline kept from computing more
    num_prefill_tokens: int = 0
    elapsed_ns: int = 0  # from time 0 to the last result, over all runs
    busy_ns: int = 0  # of all stages together
    bubble_ns: int = 0  # in which pipeline stages had a plan and waited for each other, over all stages
    num_stages: int = 1  # of all workers together; without a pipeline, a worker is one
    kv_use_ns: float = 0.0  # share of KV blocks held, times time
    kv_use_max: float = 0.0
    error_sum: float = 0.0  # of |predicted / true - 1| over iterations
    margin_ns: float = 0.0  # of the first worker, at the end
    is_cut_short: bool = False  # its verdict was certain before its end

    @property
    def num_gaps(self) -> int:
        return self.tbt.num_values

    @property
    def late_shares(self) -> list[float]:
        """Share of gaps above each target."""
        return [late / self.num_gaps if self.num_gaps else 0.0 for late in self.num_late]

    @property
    def bubble_share(self) -> float:
        """Of the time in which pipeline stages had a plan, what they waited for each other."""
        return self.bubble_ns / max(1, self.busy_ns + self.bubble_ns)

    @property
    def throughput_tok_s(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens * 1e9 / self.elapsed_ns if self.elapsed_ns else 0.0

    def merge(self, other: "Outcome") -> None:
        """Take in another run with the same targets."""
        assert self.targets_ns == other.targets_ns, "runs of one question"
        self.seeds += other.seeds
        for name in ("ttft", "tbt", "max_gap", "scheduling_delay", "batch"):
            getattr(self, name).merge(getattr(other, name))
        self.num_late = [a + b for a, b in zip(self.num_late, other.num_late, strict=True)]
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kv_use_max = max(self.kv_use_max, other.kv_use_max)
        self.is_cut_short = self.is_cut_short or other.is_cut_short

    def as_object(self) -> dict[str, Any]:
        """Return what --json writes."""
        elapsed = max(1, self.elapsed_ns)
        return {
            "ttft_ms": self.ttft.summary_ms(),
            "tbt_ms": self.tbt.summary_ms(),
            "max_gap_ms": self.max_gap.summary_ms(),
            "scheduling_delay_ms": self.scheduling_delay.summary_ms(),
            "stalls": self.num_late[0],
            "late_share": self.late_shares[0],
            "throughput_tok_s": round(self.throughput_tok_s, 3),
            "preemptions": self.num_preemptions,
            "seed": self.seeds[0] if len(self.seeds) == 1 else self.seeds,
            "requests": {
                "arrived": self.num_arrived,
                "finished": self.num_finished,
                "rejected": self.num_rejected,
            },
            "iterations": self.num_iterations,
            "bound_share": round(self.num_bound / max(1, self.num_iterations), 4),
            "mean_batch": round(self.batch.mean() or 0.0, 3),
            "prefill_tokens": self.num_prefill_tokens,
            "recomputed_tokens": self.num_recomputed_tokens,
            "gaps": self.num_gaps,
            "elapsed_s": round(self.elapsed_ns / 1e9, 3),
            "device_use": round(self.busy_ns / elapsed / self.num_stages, 4),
            "bubble_share": round(self.bubble_share, 4),
            "kv_use": {"mean": round(self.kv_use_ns / elapsed, 4), "max": round(self.kv_use_max, 4)},
            "prediction_error": round(self.error_sum / max(1, self.num_iterations), 4),
            "margin_ms": round(self.margin_ns / 1e6, 3),
        }


_SUMMED = (
    *("num_arrived", "num_finished", "num_rejected", "num_preemptions", "num_output_tokens", "num_recomputed_tokens"),
    *("num_iterations", "num_bound", "num_prefill_tokens", "elapsed_ns", "busy_ns", "bubble_ns"),
    *("kv_use_ns", "error_sum"),
)


@dataclass(slots=True)
class _Stream:
    """One request that has not ended."""

    arrived_ns: int
    is_counted: bool
    is_begun: bool = False
    last_token_ns: int = -1
    max_gap_ns: int = -1


class Measures:
    """Watches a run from where the scheduler stands, and keeps an Outcome up to date."""

    def __init__(self, targets_ns: Sequence[int], num_stages: int, seed: int, num_warmup: int = 0) -> None:
        """The first num_warmup requests load the system; what becomes of them is no part of any distribution."""
        self.outcome = Outcome(
            seeds=[seed], targets_ns=list(targets_ns), num_late=[0] * len(targets_ns), num_stages=num_stages
        )
        self._num_warmup = num_warmup
        self._streams: dict[RequestId, _Stream] = {}
        self._kv_since_ns = 0
        self._kv_use = 0.0

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def waiting_since(self) -> Iterable[int]:
        """Arrivals of requests that count and have not begun."""
        return (stream.arrived_ns for stream in self._streams.values() if stream.is_counted and not stream.is_begun)

    def note_arrival(self, request_id: RequestId, now_ns: int) -> None:
        self._streams[request_id] = _Stream(now_ns, is_counted=self.outcome.num_arrived >= self._num_warmup)
        self.outcome.num_arrived += 1

    def note_begin(self, request_id: RequestId, now_ns: int) -> None:
        """A plan introduces the request: for the first time, or again after a preemption."""
        stream = self._streams[request_id]
        if not stream.is_begun:
            stream.is_begun = True
            if stream.is_counted:
                self.outcome.scheduling_delay.add(now_ns - stream.arrived_ns)

    def note_batch(self, batch: StreamBatch, now_ns: int) -> None:
        """Tokens and ends, as the tokenizer is told of them."""
        outcome, streams = self.outcome, self._streams
        # A batch that goes on as it is has one gap for all its streams, so equal neighbours are counted together.
        run_ns = run_len = 0
        for sampled in batch.sampled:
            stream = streams[sampled.request_id]
            last_ns = stream.last_token_ns
            stream.last_token_ns = now_ns
            if not stream.is_counted:
                continue
            if last_ns < 0:
                outcome.ttft.add(now_ns - stream.arrived_ns)
                continue
            gap_ns = now_ns - last_ns
            if gap_ns != run_ns:
                self._count_gaps(run_ns, run_len)
                run_ns, run_len = gap_ns, 0
            run_len += 1
            if gap_ns > stream.max_gap_ns:  # noqa: PLR1730 - max() takes thrice as long, once for every token.
                stream.max_gap_ns = gap_ns
        self._count_gaps(run_ns, run_len)
        outcome.num_output_tokens += len(batch.sampled)
        for ended in batch.ended:
            stream = streams.pop(ended.request_id)
            if stream.max_gap_ns >= 0:
                outcome.max_gap.add(stream.max_gap_ns)
            if stream.last_token_ns < 0:
                outcome.num_rejected += 1
            else:
                outcome.num_finished += 1

    def _count_gaps(self, gap_ns: int, count: int) -> None:
        if count:
            self.outcome.tbt.add(gap_ns, count)
            for index, target_ns in enumerate(self.outcome.targets_ns):
                if gap_ns > target_ns:
                    self.outcome.num_late[index] += count

    def note_kv_use(self, share: float, now_ns: int) -> None:
        """From now on, this share of KV blocks is held."""
        outcome = self.outcome
        outcome.kv_use_ns += self._kv_use * (now_ns - self._kv_since_ns)
        self._kv_since_ns, self._kv_use = now_ns, share
        outcome.kv_use_max = max(outcome.kv_use_max, share)
