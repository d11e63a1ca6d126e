"""Is the engine fast? Decodes against the bytes they must read, prefill against the operations it must do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic_ns
from typing import Any

import torch

from common.cost.devices import DEVICES
from common.cost.load import Load
from common.messages.requests import Sampling
from gpu_worker.check.setup import Bench
from gpu_worker.cuda.device import Device
from gpu_worker.cuda.kinds import kind_of
from gpu_worker.cuda.runner import CudaRunner
from gpu_worker.slots import Row

WARM_UP_RUNS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """One load, and the device's time for it."""

    case: str
    load: Load
    ns: float


def measure(runner: CudaRunner, rows: Sequence[Row], repeats: int) -> float:
    """Return the median device time of an iteration, in ns, launched one ahead as in service."""
    times: list[int] = []
    due = [runner.launch(rows)]
    for _ in range(WARM_UP_RUNS + repeats):
        due.append(runner.launch(rows))
        times.append(due.pop(0).wait().device_ns)
    due.pop().wait()
    return float(median(times[WARM_UP_RUNS:]))


def load_of(rows: Sequence[Row]) -> Load:
    """Return what the cost model knows of an iteration."""
    load = Load()
    for row in rows:
        if row.num_tokens == 1:
            load.add_decodes(1, row.start)
        else:
            load.add_chunk(row.start, row.num_tokens, is_sampled=row.is_sampled)
    return load


def decode_speed(bench: Bench, is_over: Callable[[], bool]) -> Iterator[tuple[dict[str, Any], Measured]]:
    """Measure decode batches, out of graphs where there are some and without, beside the time of their bytes."""
    device = DEVICES[kind_of(bench.device.name)]
    eager = bench.runner_of(bench.backend)
    for num_rows, context in bench.scale.decode_cases:
        if is_over():
            return
        rows = bench.decodes(num_rows, context)
        floor_ns = decode_bytes(bench, num_rows, context) / device.bytes_per_s * 1e9
        graph_ns = measure(bench.runner, rows, bench.scale.repeats)
        eager_ns = measure(eager, rows, bench.scale.repeats)
        case = f"{num_rows}x{context}"
        line = {
            "case": case,
            "ms": _ms(graph_ns),
            "eager_ms": _ms(eager_ns),
            "floor_ms": _ms(floor_ns),
            "to_floor": round(graph_ns / floor_ns, 2),
        }
        yield line, Measured(f"decode {case}", load_of(rows), graph_ns)


def decode_bytes(bench: Bench, num_rows: int, context: int) -> float:
    """Return what a decode batch must read: every weight but the embedding, and all of its keys and values."""
    shape = bench.shape
    return shape.num_weights * shape.bytes_per_weight + num_rows * context * shape.kv_bytes_per_token


def prefill_speed(bench: Bench, is_over: Callable[[], bool]) -> Iterator[tuple[dict[str, Any], Measured]]:
    """Measure lone chunks, and the share of the device's peak that their useful operations are."""
    device = DEVICES[kind_of(bench.device.name)]
    for context in bench.scale.prefill_contexts:
        for num_tokens in bench.scale.prefill_lens:
            if is_over():
                return
            rows = [bench.row(0, context, num_tokens, 0)]
            ns = measure(bench.runner, rows, bench.scale.repeats)
            line = {
                "case": f"{num_tokens} after {context}",
                "ms": _ms(ns),
                "tokens_per_s": round(num_tokens / ns * 1e9),
                "mfu": round(prefill_operations(bench, context, num_tokens) / device.flops_per_s / ns * 1e9, 3),
            }
            yield line, Measured(f"prefill {num_tokens} after {context}", load_of(rows), ns)


def prefill_operations(bench: Bench, context: int, num_tokens: int) -> float:
    """Return the floating-point operations that a chunk needs: linear layers, causal attention, one row of the head."""
    shape = bench.shape
    head = shape.hidden_size * shape.vocab_size
    linear = 2 * (shape.num_weights - head) * num_tokens
    pairs = num_tokens * (context + (num_tokens + 1) / 2)
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    return linear + attention + 2 * head


def hybrid_speed(
    bench: Bench, other_calls: CudaRunner, is_over: Callable[[], bool]
) -> Iterator[tuple[dict[str, Any], Measured]]:
    """Measure decodes beside a chunk; other_calls has attention in one call where the bench's runner has two."""
    num_decodes, context = bench.scale.hybrid_decodes
    decodes = bench.decodes(num_decodes, context)
    for num_tokens in bench.scale.hybrid_chunks:
        if is_over():
            return
        start = min(2048, bench.scale.config.max_model_len // 4)
        rows = [*decodes, bench.row(num_decodes, start, num_tokens, 0)] if num_tokens else decodes
        split_ns = measure(bench.runner, rows, bench.scale.repeats)
        one_ns = measure(other_calls, rows, bench.scale.repeats)
        case = f"{num_decodes}x{context} + {num_tokens}"
        yield (
            {"case": case, "ms": _ms(split_ns), "one_call_ms": _ms(one_ns)},
            Measured(f"hybrid {case}", load_of(rows), split_ns),
        )


def host_gaps(bench: Bench, num_rows: int, context: int, num_iterations: int) -> dict[str, float]:
    """Return how long the device waits for the host between decode iterations, launched one ahead and one by one."""
    rows = bench.decodes(num_rows, context)
    measure(bench.runner, rows, 1)
    gaps: dict[str, float] = {}
    for name, ahead in (("one_by_one_ms", 0), ("one_ahead_ms", 1)):
        due, device_ns = [], 0
        started_ns = monotonic_ns()
        for _ in range(num_iterations):
            due.append(bench.runner.launch(rows))
            if len(due) > ahead:
                device_ns += due.pop(0).wait().device_ns
        device_ns += sum(launched.wait().device_ns for launched in due)
        gaps[name] = _ms((monotonic_ns() - started_ns - device_ns) / num_iterations)
    return gaps


def launch_without_waiting(bench: Bench, num_rows: int, context: int) -> None:
    """Launch a decode and a hybrid iteration while CUDA raises on whatever makes the host wait. One request of each
    asks for all that a request can ask for.

    Raises:
        RuntimeError: Of torch, naming the operation.
    """
    decodes = bench.decodes(num_rows, context)
    hybrid = [*decodes[1:], bench.row(0, 0, bench.scale.prefill_lens[0], 0)]
    for row in (decodes[0], hybrid[-1]):
        row.resident.sampling = Sampling(
            top_p=0.9,
            top_k=50,
            min_p=0.01,
            repetition_penalty=1.1,
            frequency_penalty=0.1,
            presence_penalty=0.1,
            logit_bias=((1, 1.0), (2, -1.0)),
            min_tokens=1 << 20,
            stop_token_ids=(3, 4),
            logprobs=2,
            prompt_logprobs=0,
        )
    for rows in (decodes, hybrid):
        bench.runner.launch(rows).wait()  # What is new of these requests is uploaded here.
        is_cuda = bench.device.torch_device.type == "cuda"
        if is_cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            launched = bench.runner.launch(rows)
        finally:
            if is_cuda:
                torch.cuda.set_sync_debug_mode("default")
        launched.wait()


def peaks(bench_device: Device, *, is_tiny: bool) -> dict[str, float]:
    """Return what a copy and a matrix product reach on this device: GB/s and TFLOP/s."""
    device = bench_device.torch_device
    num_bytes, size = (1 << 22, 256) if is_tiny else (8 << 30, 8192)
    dtype = torch.float32 if is_tiny else torch.bfloat16
    source = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    matrix = torch.randn(size, size, device=device).to(dtype)
    copy_ms = _timed(bench_device, lambda: target.copy_(source))
    product_ms = _timed(bench_device, lambda: matrix @ matrix)
    return {
        "copy_gb_per_s": round(2 * num_bytes / copy_ms / 1e6, 1),
        "product_tflop_per_s": round(2 * size**3 / product_ms / 1e9, 2),
    }


def _timed(bench_device: Device, run: Callable[[], object]) -> float:
    times = []
    for _ in range(WARM_UP_RUNS + 5):
        started, finished = bench_device.event(), bench_device.event()
        started.record()
        run()
        finished.record()
        finished.wait()
        times.append(finished.ms_since(started))
    return max(median(times[WARM_UP_RUNS:]), 1e-6)


def _ms(ns: float) -> float:
    return round(ns / 1e6, 3)
