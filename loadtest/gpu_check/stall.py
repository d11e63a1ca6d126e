"""The stall test: streams decode, a long prompt arrives. The real scheduler core, the real runner, no sockets."""

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from common.ids import InstanceId, RequestId, Slot, TokenizerId, WorkerId, pack_ids
from common.messages.cards import ModelCard, ProfilePoint, WorkerCard
from common.messages.plans import IterationDone, PlanRefused
from common.messages.requests import Sampling
from common.messages.streams import RequestArrived
from gpu_worker.check.setup import Bench, random_tokens
from gpu_worker.check.speed import measure
from gpu_worker.cuda.kinds import kind_of
from gpu_worker.cuda.pipeline import Pipeline
from gpu_worker.slots import Iteration, PlanState
from services.scheduler.core import SchedulerCore
from services.scheduler.encoder import PlanEncoder
from services.scheduler.events import Event, RunIteration, SendStreams, WakeAt, WorkerJoined, WorkerReported
from services.scheduler.limits import Limits

WORKER = WorkerId(InstanceId("worker-check"))
TOKENIZER = TokenizerId(InstanceId("tokenizer-check"))
WARM_ITERATIONS = 30
"""Decodes before the prompt comes, for the core's predictions to settle."""
MOST_TOKENS = 2000
"""Of a stream: more than it needs, and few enough that the pool has room for the prompt at once."""
LONGEST_WAIT_S = 30.0
"""For a result; then the device is taken to hang."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to schedule."""

    name: str
    policy: str
    token_budget: int | None


CONTENDERS = (
    Contender("derived", "stall_free", None),
    Contender("budget 512", "stall_free", 512),
    Contender("budget 1024", "stall_free", 1024),
    Contender("budget 2048", "stall_free", 2048),
    Contender("prefill_first", "prefill_first", None),
)


@dataclass(slots=True)
class _Stream:
    times_ns: list[int] = field(default_factory=list)
    has_ended: bool = False


class StallTest:
    """One contender on one runner."""

    def __init__(self, bench: Bench, card: WorkerCard, contender: Contender, tbt_target_ms: float) -> None:
        self._bench = bench
        self._core = SchedulerCore(
            Limits(
                tbt_target_ns=int(tbt_target_ms * 1e6),
                policy=contender.policy,
                fixed_token_budget=contender.token_budget,
                max_batched_tokens=bench.limits.max_chunk_tokens,
                has_prefix_cache=False,
            )
        )
        self._encoder = PlanEncoder()
        self._state = PlanState(bench.limits)
        self._results: queue.Queue[IterationDone | PlanRefused | BaseException] = queue.Queue()
        self._pipeline = Pipeline(bench.runner, self._results.put)
        self._streams: dict[RequestId, _Stream] = {}
        self._names: dict[Slot, RequestId] = {}
        self.num_iterations = 0
        self._step(WorkerJoined(worker_id=WORKER, card=card))

    def run(self) -> dict[str, Any]:
        """Return the gaps of the streams while the prompt is read, and the prompt's time to its first token, in ms."""
        scale = self._bench.scale
        try:
            for index in range(scale.stall_streams):
                self._arrive(f"stream-{index}", scale.stall_context, MOST_TOKENS, seed=index)
            while self._least_len() < WARM_ITERATIONS:
                self._advance()
            self._arrive("prompt", scale.stall_prompt, 1, seed=99)
            arrived_ns = monotonic_ns()
            marks = {name: len(stream.times_ns) for name, stream in self._streams.items()}
            while not self._streams[RequestId("prompt")].has_ended:
                self._advance()
            first_token_ns = self._streams[RequestId("prompt")].times_ns[0]
            for _ in range(3):  # The gap that the last chunk made ends with the token after it.
                self._advance()
        finally:
            self._pipeline.close()
        gaps = [
            (later - earlier) / 1e6
            for name, stream in self._streams.items()
            if name != "prompt"
            for earlier, later in zip(stream.times_ns[marks[name] - 1 :], stream.times_ns[marks[name] :], strict=False)
        ]
        gaps.sort()
        return {
            "max_gap_ms": round(gaps[-1], 2),
            "p99_gap_ms": round(gaps[int(0.99 * (len(gaps) - 1))], 2),
            "median_gap_ms": round(gaps[len(gaps) // 2], 2),
            "num_gaps": len(gaps),
            "prompt_ttft_ms": round((first_token_ns - arrived_ns) / 1e6, 1),
        }

    def _least_len(self) -> int:
        return min(len(stream.times_ns) for stream in self._streams.values())

    def _arrive(self, name: str, num_tokens: int, max_tokens: int, seed: int) -> None:
        request_id = RequestId(name)
        most = self._bench.limits.max_model_len
        self._streams[request_id] = _Stream()
        self._step(
            RequestArrived(
                request_id=request_id,
                tokenizer_id=TOKENIZER,
                attempt=0,
                token_ids=pack_ids(random_tokens(num_tokens, self._bench.scale.config.vocab_size, seed)),
                num_prompt_tokens=num_tokens,
                max_tokens=min(max_tokens, most - num_tokens),
                seed=seed,
                sampling=Sampling(temperature=0.0, ignore_eos=True),
            )
        )

    def _advance(self) -> None:
        """Take one result in, and launch what the core then plans."""
        result = self._results.get(timeout=LONGEST_WAIT_S)
        if isinstance(result, BaseException):
            raise result
        self.num_iterations += 1
        if isinstance(result, IterationDone):
            self._note(result)
        self._step(WorkerReported(worker_id=WORKER, report=result))

    def _note(self, done: IterationDone) -> None:
        for slot in done.slots:
            self._streams[self._names[slot]].times_ns.append(done.finished_ns)

    def _step(self, event: Event) -> None:
        for effect in self._core.step(event, monotonic_ns()):
            match effect:
                case RunIteration():
                    self._launch(effect)
                case SendStreams():
                    for ended in effect.batch.ended:
                        self._streams[ended.request_id].has_ended = True
                case WakeAt():
                    pass  # Nothing here waits for long.
                case _:
                    pass

    def _launch(self, planned: RunIteration) -> None:
        received_ns = monotonic_ns()
        iteration = self._state.apply(self._encoder.encode(planned))
        if not isinstance(iteration, Iteration):
            raise RuntimeError(f"the worker's side refused a plan of the core: {iteration}")
        rows = iteration.rows
        slots = tuple(row.resident.slot for row in rows if row.is_sampled)
        self._names.update((row.resident.slot, row.resident.request_id) for row in rows)
        self._pipeline.run(
            rows,
            lambda computed, finished_ns: self._results.put(
                IterationDone(
                    epoch=iteration.epoch,
                    iteration=iteration.iteration,
                    slots=slots,
                    token_ids=tuple(computed.token_ids),
                    received_ns=received_ns,
                    started_ns=received_ns,
                    finished_ns=finished_ns,
                    device_ns=computed.device_ns,
                )
            ),
        )


def card_of(bench: Bench) -> WorkerCard:
    """Return what a worker with this bench's model would say of itself; its profile is measured here."""
    return WorkerCard(
        model=ModelCard(
            name="gpu-check",
            max_model_len=bench.limits.max_model_len,
            vocab_size=bench.limits.vocab_size,
            eos_token_ids=(),
        ),
        shape=bench.shape,
        device=bench.device.name,
        device_kind=kind_of(bench.device.name),
        dtype=str(bench.scale.dtype).removeprefix("torch."),
        attention=bench.backend.name,
        is_batch_invariant=False,
        block_size=bench.limits.block_size,
        num_blocks=bench.limits.num_blocks,
        max_num_slots=bench.limits.max_num_slots,
        max_chunk_tokens=bench.limits.max_chunk_tokens,
        profile=_profile(bench, [length for length in bench.scale.prefill_lens if length % 2 == 0]),
    )


def _profile(bench: Bench, sizes: Sequence[int]) -> tuple[ProfilePoint, ...]:
    num_decodes, context = bench.scale.bar_case[0] // 4, bench.scale.stall_context
    decodes = bench.decodes(num_decodes, context)
    points = []
    for size in sizes:
        num_tokens = size - num_decodes
        rows = [*decodes, bench.row(num_decodes, 0, num_tokens, 0)]
        points.append(
            ProfilePoint(
                num_tokens=size,
                iteration_ns=int(measure(bench.runner, rows, bench.scale.repeats)),
                num_decodes=num_decodes,
                decode_context=context,
            )
        )
    return tuple(points)
