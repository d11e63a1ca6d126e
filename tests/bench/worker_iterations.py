"""What bench_worker measures, and its table."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from common.ids import Slot
from common.models import find_model
from gpu_worker.attention import choose_backend
from gpu_worker.attention.base import AttentionSpec
from gpu_worker.batch import flatten
from gpu_worker.forward import make_forward
from gpu_worker.kernels.library import Engine, Kernels, WeightType, find_kernels
from gpu_worker.kernels.program import FlatRows, Program
from gpu_worker.kv_cache import KvCache
from gpu_worker.loading import LoadedModel, load_model, open_model
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.llama_native import NativeLlama
from gpu_worker.profile import made_up_row
from gpu_worker.slots import Limits, Row
from gpu_worker.threads import num_usable_cores

BLOCK_SIZE = 16
NUM_BLOCKS = 2048
RUNS = 9
LONG_S = 0.5
"""Iterations longer than this run three times only."""
MEMORY_BYTES = 512 << 20
"""Far beyond any cache."""


@dataclass(frozen=True)
class Kind:
    """An iteration: rows of (start, num_tokens)."""

    name: str
    rows: list[tuple[int, int]]


KINDS = [
    *(Kind(f"decode {n} @ {context}", [(context, 1)] * n) for context in (128, 1024, 4000) for n in (1, 4, 8, 16)),
    *(Kind(f"prefill {n}", [(0, n)]) for n in (64, 256, 1024)),
    Kind("hybrid 4 @ 512 + 64", [(512, 1)] * 4 + [(512, 64)]),
    Kind("hybrid 8 @ 512 + 256", [(512, 1)] * 8 + [(0, 256)]),
]


@dataclass(frozen=True)
class Rates:
    """What the machine does with nothing else to do for the same threads."""

    read_bytes_per_s: float
    operations_per_s: float  # multiplications and additions of float32
    product_operations_per_s: float  # the same of products by such weights, where inputs may be bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_worker")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--weights", choices=("dtype", "int8"), default="dtype")
    parser.add_argument(
        "--kernels", choices=("auto", "amx", "avx512bf16", "avx512", "avx2", "portable"), default="auto"
    )
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--torch", action="store_true", help="run each iteration on plain torch in float32, too")
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = find_kernels(options.kernels)
    assert kernels is not None, "no kernels, nothing to measure"
    dtype: torch.dtype = getattr(torch, options.dtype)
    weight_type = {
        ("int8", options.dtype): WeightType.INT8,
        ("dtype", "float32"): WeightType.FLOAT32,
        ("dtype", "bfloat16"): WeightType.BFLOAT16,
    }[options.weights, options.dtype]
    bench = _Bench(
        load_model(open_model(find_model(options.model)), dtype), kernels, dtype, weight_type, options.threads
    )
    plain = _plain(load_model(open_model(find_model(options.model)), torch.float32)) if options.torch else None
    measured = []
    rates = [measure_rates(kernels, options.threads, weight_type)]
    for kind in KINDS:
        if options.only in kind.name and bench.fits(kind):
            torch_s = least_seconds(partial(plain, bench.rows(kind))) if plain else None
            measured.append((kind, *bench.measure(kind), torch_s))
            rates.append(measure_rates(kernels, options.threads, weight_type))
    best = Rates(
        max(it.read_bytes_per_s for it in rates),
        max(it.operations_per_s for it in rates),
        max(it.product_operations_per_s for it in rates),
    )
    print(
        f"{kernels.instruction_set}, {options.threads} threads, {weight_type.name.lower()} weights, {options.dtype} KV"
    )
    for name, unit, values in (
        ("reads", "GB/s", [it.read_bytes_per_s / 1e9 for it in rates]),
        ("multiplies", "GFLOP/s", [it.operations_per_s / 1e9 for it in rates]),
        ("multiplies by weights", "GFLOP/s", [it.product_operations_per_s / 1e9 for it in rates]),
    ):
        print(f"{name} {max(values):.0f} {unit} (between iterations {min(values):.0f} to {max(values):.0f})")
    header = f"{'iteration':<22}{'ms':>8}{'floor':>8}{'share':>7}{'tokens/s':>10}"
    print(header + (f"{'torch ms':>10}{'ratio':>7}" if plain else "") + "   where it goes")
    for kind, seconds, shares, torch_s in measured:
        floor_s = bench.floor_s(kind, best)
        per_s = sum(count for _, count in kind.rows) / seconds
        line = f"{kind.name:<22}{seconds * 1e3:8.2f}{floor_s * 1e3:8.2f}{floor_s / seconds:7.0%}{per_s:10.0f}"
        if torch_s:
            line += f"{torch_s * 1e3:10.1f}{torch_s / seconds:7.1f}"
        print(line + "   " + "  ".join(f"{name} {share:.0%}" for name, share in shares), flush=True)


class _Bench:
    """A packed model, and batches of each kind."""

    def __init__(
        self, model: LoadedModel, kernels: Kernels, dtype: torch.dtype, weight_type: WeightType, threads: int
    ) -> None:
        self._config = config = model.config
        self._limits = _limits_of(model)
        self._dtype = dtype
        self._weight_bytes = {WeightType.FLOAT32: 4, WeightType.BFLOAT16: 2, WeightType.INT8: 1}[weight_type]
        cache = KvCache.allocate_by_head(
            num_layers=config.num_layers,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )
        self._native = NativeLlama(
            Engine(kernels, threads),
            config,
            model.weights,
            cache,
            weight_type=weight_type,
            max_model_len=model.max_model_len,
            max_tokens=self._limits.max_chunk_tokens,
            max_samples=self._limits.max_num_slots,
        )

    def fits(self, kind: Kind) -> bool:
        return sum(-(-(start + count) // BLOCK_SIZE) for start, count in kind.rows) <= NUM_BLOCKS

    def rows(self, kind: Kind) -> list[Row]:
        rows, first_block = [], 0
        for slot, (start, count) in enumerate(kind.rows):
            rows.append(made_up_row(self._limits, Slot(slot), start, count, first_block))
            first_block += -(-(start + count) // BLOCK_SIZE)
        return rows

    def measure(self, kind: Kind) -> tuple[float, list[tuple[str, float]]]:
        """Return the least seconds of several runs, and each operation's share of the best run, greatest first."""
        batch = _flat_rows(self.rows(kind))
        best_s, best_ns = float("inf"), torch.empty(0)
        runs = RUNS
        while runs:
            operation_ns = torch.zeros(len(self._native.program.names), dtype=torch.int64)
            started = time.perf_counter()
            self._native.forward(batch, operation_ns)
            seconds = time.perf_counter() - started
            runs = min(runs - 1, 2) if seconds > LONG_S else runs - 1
            if seconds < best_s:
                best_s, best_ns = seconds, operation_ns
        by_name: dict[str, int] = {}
        for name, ns in zip(self._native.program.names, best_ns.tolist(), strict=True):
            by_name[name] = by_name.get(name, 0) + ns
        total = best_s * 1e9
        shares = sorted(
            ((name, ns / total) for name, ns in by_name.items() if ns / total >= 0.005), key=lambda it: -it[1]
        )
        return best_s, [*shares, ("outside", 1 - sum(by_name.values()) / total)]

    def floor_s(self, kind: Kind, rates: Rates) -> float:
        """Return the time of what must be read or multiplied, whichever is longer, for layers and head each."""
        config = self._config
        num_tokens = sum(count for _, count in kind.rows)
        layer_weights = config.num_layers * _layer_weights(config)
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in kind.rows)
        keys = sum(start + count for start, count in kind.rows)
        kv_bytes = 2 * config.num_layers * keys * config.num_kv_heads * config.head_dim * self._dtype.itemsize
        attention = 4 * pairs * config.num_layers * config.num_heads * config.head_dim
        products = 2 * layer_weights * num_tokens
        layers_s = max(
            (layer_weights * self._weight_bytes + kv_bytes) / rates.read_bytes_per_s,
            products / rates.product_operations_per_s + attention / rates.operations_per_s,
        )
        head = config.vocab_size * config.hidden_size
        return layers_s + max(
            head * self._weight_bytes / rates.read_bytes_per_s,
            2 * head * len(kind.rows) / rates.product_operations_per_s,
        )


def measure_rates(kernels: Kernels, threads: int, weight_type: WeightType) -> Rates:
    """Measure with the kernels' own products: one row by a matrix that no cache holds, and many by one that fits."""
    engine = Engine(kernels, threads)
    inputs = 1024
    large = _product(engine, torch.zeros(MEMORY_BYTES // (2 * inputs), inputs, dtype=torch.bfloat16), num_rows=1)
    # As such weights are multiplied, and as float32 is.
    dtypes = (torch.float32, torch.bfloat16 if kernels.rounds_inputs(weight_type) else torch.float32)
    small_s = [
        least_seconds(_product(engine, torch.zeros(512, inputs, dtype=dtype), num_rows=448), runs=40)
        for dtype in dtypes
    ]
    return Rates(MEMORY_BYTES / least_seconds(large), *(2 * 448 * 512 * inputs / seconds for seconds in small_s))


def _product(engine: Engine, weights: Tensor, num_rows: int) -> Callable[[], object]:
    program = Program(num_rows, 0)
    x, y = program.token_buffer(weights.shape[1]).zero_(), program.token_buffer(weights.shape[0]).zero_()
    weight_type = WeightType.BFLOAT16 if weights.dtype == torch.bfloat16 else WeightType.FLOAT32
    program.linear("product", engine.kernels.pack(weights, weight_type), x, y)
    nothing = torch.zeros(1, dtype=torch.int64)
    batch = FlatRows(
        token_ids=nothing,
        positions=nothing,
        slots=nothing,
        sampled=nothing[:0],
        query_lens=torch.tensor([num_rows], dtype=torch.int32),
        kv_lens=torch.tensor([num_rows], dtype=torch.int32),
        block_tables=nothing.view(1, 1),
    )
    return lambda: program.run(engine, batch)


def least_seconds(run: Callable[[], object], runs: int = RUNS) -> float:
    """Return the least time of several runs, fewer if one is long."""
    best = float("inf")
    while runs:
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        best = min(best, seconds)
        runs = min(runs - 1, 2) if seconds > LONG_S else runs - 1
    return best


def _plain(model: LoadedModel) -> Callable[[list[Row]], Tensor]:
    """Return a forward pass of plain torch."""
    config, limits = model.config, _limits_of(model)
    spec = AttentionSpec(
        device="cpu",
        dtype=torch.float32,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
    )
    forward, _ = make_forward(model, choose_backend("cpu", spec), spec, limits)

    def run(rows: list[Row]) -> Tensor:
        with torch.inference_mode():
            return forward(flatten(rows, BLOCK_SIZE))

    return run


def _limits_of(model: LoadedModel) -> Limits:
    return Limits(
        vocab_size=model.config.vocab_size,
        max_model_len=model.max_model_len,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_slots=64,
        max_chunk_tokens=2048,
    )


def _flat_rows(rows: list[Row]) -> FlatRows:
    batch = flatten(rows, BLOCK_SIZE)
    return FlatRows(
        token_ids=batch.token_ids,
        positions=batch.positions,
        slots=batch.slots,
        sampled=batch.sampled,
        query_lens=torch.tensor(batch.layout.query_lens, dtype=torch.int32),
        kv_lens=torch.tensor(batch.layout.kv_lens, dtype=torch.int32),
        block_tables=batch.layout.block_tables,
    )


def _layer_weights(config: ModelConfig) -> int:
    width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * width + 2 * kv_width + 3 * config.intermediate_size)
