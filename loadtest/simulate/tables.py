"""Truth from measured kernels: interpolated tables, with steps where the predictor's formulas are smooth.

The tables are those of NVIDIA's AIConfigurator and of Vidur, read by path from a folder that is no part of this
project; where the folder lacks them, tables of the same columns are generated (loadtest.simulate.generated). Nothing
here shares a formula with common.cost.roofline: a test of the predictor against itself would prove nothing.
"""

import csv
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common.cost.devices import Device
from common.cost.shapes import ModelShape
from loadtest.simulate.generated import generated_rows
from loadtest.simulate.truth import Work

TILE = 64
"""A matrix product of some rows takes what the next multiple of so many takes, above the first."""
LAUNCH_S = 5e-6
NUM_LAUNCHES = 12
"""Kernels of a layer, each launched by the host: in small iterations that takes longer than the kernels."""
HOST_S = 1.2e-3
HOST_ROW_S = 8e-6
"""Preparing inputs and sampling: for an iteration, and for each row of it."""
ELEMENTWISE_BYTES_SHARE = 0.4
MAX_ROWS = 200_000
"""Of one table; a bound against a wrong file."""

Row = dict[str, str]


class Curve:
    """Linear between known points, in proportion beyond the last, level before the first."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        ordered = sorted(dict(points).items())
        self._xs = [x for x, _ in ordered]
        self._ys = [y for _, y in ordered]

    def at(self, x: float) -> float:
        xs, ys = self._xs, self._ys
        if x <= xs[0]:
            return ys[0]
        if x >= xs[-1]:
            return ys[-1] * x / xs[-1]
        right = bisect_right(xs, x)
        share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
        return ys[right - 1] + share * (ys[right] - ys[right - 1])


class TableTruth:
    """One device, or tensor-parallel group, as its kernels were measured."""

    def __init__(self, shape: ModelShape, device: Device, tensor_parallel: int, profiles: Path | None) -> None:
        self._shape = shape
        self._layers = shape.num_layers
        self._heads = shape.num_heads / tensor_parallel
        self._kv_heads = max(1.0, shape.num_kv_heads / tensor_parallel)
        tables = _Tables(device, profiles)
        hidden, head_dim = shape.hidden_size, shape.head_dim
        ff = shape.intermediate_size / tensor_parallel
        products = (
            ((self._heads + 2 * self._kv_heads) * head_dim, hidden),
            (hidden, self._heads * head_dim),
            (2 * ff, hidden),
            (hidden, ff),
        )
        curves = [tables.product(outputs, inputs) for outputs, inputs in products]
        reduce_ns = tables.all_reduce(tensor_parallel)
        self._layer_ns: dict[int, float] = {}
        self._linear: Callable[[int], float] = lambda rows: (
            sum(curve.at(rows) for curve in curves) + 2 * reduce_ns(2.0 * rows * hidden)
        )
        self._head = tables.product(shape.vocab_size / tensor_parallel, hidden)
        scale = head_dim / 128
        self._prefill, prefill_heads = tables.prefill(self._heads, self._kv_heads)
        self._prefill_scale = scale * self._heads / prefill_heads
        self._decode, decode_kv_heads = tables.decode(self._heads, self._kv_heads)
        self._decode_scale = scale * self._kv_heads / decode_kv_heads
        moved = shape.bytes_per_weight * (7 * hidden + 2 * (self._heads + self._kv_heads) * head_dim + 3 * ff)
        self._elementwise_ns = 1e9 * moved / (ELEMENTWISE_BYTES_SHARE * device.bytes_per_s)

    def time_ns(self, work: Work) -> float:
        load = work.load
        layer_ns = self._linear_ns(load.num_tokens) + self._elementwise_ns * load.num_tokens
        if work.chunks:
            layer_ns += self._prefill_ns(work.chunks)
        if load.num_decodes:
            layer_ns += self._decode_scale * self._decode(load.num_decodes, load.decode_keys / load.num_decodes)
        kernels_ns = self._layers * layer_ns
        launches_ns = 1e9 * self._layers * NUM_LAUNCHES * LAUNCH_S
        head_ns = self._head.at(_whole_tiles(load.num_sampled)) if load.num_sampled else 0.0
        num_rows = load.num_decodes + load.num_chunks
        return max(kernels_ns, launches_ns) + head_ns + 1e9 * (HOST_S + HOST_ROW_S * num_rows)

    def _linear_ns(self, num_tokens: int) -> float:
        rows = _whole_tiles(num_tokens)
        found = self._layer_ns.get(rows)
        if found is None:
            found = self._layer_ns[rows] = self._linear(rows)
        return found

    def _prefill_ns(self, chunks: list[tuple[int, int]]) -> float:
        """A chunk behind some context takes what the whole prompt up to its end takes, less what that up to its start
        does; all chunks of an iteration share one launch."""
        launch_ns = self._prefill.at(0)
        total = launch_ns
        for start, num_tokens in chunks:
            total += max(0.0, self._prefill.at(start + num_tokens) - self._prefill.at(start))
        return self._prefill_scale * total


class _Tables:
    """The kernels of one device, read once."""

    def __init__(self, device: Device, profiles: Path | None) -> None:
        self._device = device
        self._name = device.name.split("-")[0]
        self._profiles = profiles
        self._products: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for row in self._rows("gemm"):
            key = int(row["n"]), int(row["k"])
            self._products.setdefault(key, []).append((float(row["m"]), 1e6 * float(row["latency_ms"])))

    def product(self, outputs: float, inputs: float) -> Curve:
        """Time of a matrix product over its rows, from the four measured shapes around the one asked for.

        Between shapes the time grows with the weights that are read, so it is interpolated per weight.
        """
        num_outputs = sorted({n for n, _ in self._products})
        num_inputs = sorted({k for _, k in self._products})
        curves = [
            (share_n * share_k, outputs * inputs / (n * k), Curve(self._products[n, k]))
            for n, share_n in _around(num_outputs, outputs)
            for k, share_k in _around(num_inputs, inputs)
            if (n, k) in self._products
        ]
        total = sum(share for share, _, _ in curves)
        rows = sorted({m for points in self._products.values() for m, _ in points})
        return Curve([(m, sum(share * scale * curve.at(m) for share, scale, curve in curves) / total) for m in rows])

    def prefill(self, heads: float, kv_heads: float) -> tuple[Curve, float]:
        """Attention of one prompt over its length, and for how many heads that is."""
        rows = [row for row in self._rows("attn_prefill") if row["head_dim"] == "128" and row["batch_size"] == "1"]
        near = _nearest_heads(rows, heads, kv_heads)
        points = [(float(row["seq_len"]), 1e6 * float(row["latency_ms"])) for row in rows if _heads_of(row) == near]
        return _Convex(points), near[0]

    def decode(self, heads: float, kv_heads: float) -> tuple[Callable[[int, float], float], float]:
        """Attention of a decode batch over its size and its mean context, and for how many KV heads that is."""
        rows = [row for row in self._rows("attn_decode") if row["head_dim"] == "128"]
        near = _nearest_heads(rows, heads, kv_heads)
        by_size: dict[int, list[tuple[float, float]]] = {}
        for row in rows:
            if _heads_of(row) == near:
                point = float(row["context_len"]), 1e6 * float(row["latency_ms"])
                by_size.setdefault(int(row["batch_size"]), []).append(point)
        curves = {size: Curve(points) for size, points in by_size.items()}
        sizes = sorted(curves)

        def decode_ns(num_rows: int, context: float) -> float:
            return sum(
                share * num_rows / size * curves[size].at(context)
                if num_rows > sizes[-1]
                else share * curves[size].at(context)
                for size, share in _around(sizes, num_rows)
            )

        return decode_ns, near[1]

    def all_reduce(self, tensor_parallel: int) -> Callable[[float], float]:
        """Time of an all-reduce over its bytes."""
        if tensor_parallel == 1:
            return lambda size_bytes: 0.0
        node = "h100_dgx" if self._name in ("h100", "h200") else "a100_dgx"
        points = [
            (float(row["size_bytes"]), 1e6 * float(row["median_ms"]))
            for row in self._rows("collectives")
            if (row["node"], row["collective"], row["num_workers"], row["devices_per_node"])
            == (node, "all_reduce", str(tensor_parallel), str(tensor_parallel))
        ]
        return Curve(points).at

    def _rows(self, kind: str) -> Iterator[Row]:
        found = self._file(kind)
        if found is None:
            yield from generated_rows(kind, self._device)
            return
        with found.open(newline="", encoding="utf-8") as file:
            for index, row in enumerate(csv.DictReader(file)):
                if index >= MAX_ROWS:
                    raise ValueError(f"{found.name} has more than {MAX_ROWS} rows")
                yield row

    def _file(self, kind: str) -> Path | None:
        if self._profiles is None:
            return None
        if kind == "collectives":
            pattern = "vidur_collectives.csv"
        else:
            pattern = f"aic_{'gemm_bf16' if kind == 'gemm' else kind}_{self._name}_vllm0.14.csv"
        return next(iter(sorted(self._profiles.glob(pattern))), None)


class _Convex(Curve):
    """A curve of causal attention: between points its square root is linear, as the pairs grow with the square."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        super().__init__(points)
        self._floor = self._ys[0]
        self._roots = Curve(
            [(x, math.sqrt(max(0.0, y - self._floor))) for x, y in zip(self._xs, self._ys, strict=True)]
        )

    def at(self, x: float) -> float:
        return self._floor + self._roots.at(x) ** 2


def _around(values: Sequence[int], wanted: float) -> list[tuple[int, float]]:
    """The neighbours of a value, each with its share; the nearest alone outside of all values."""
    right = bisect_right(values, wanted)
    if right == 0:
        return [(values[0], 1.0)]
    if right == len(values) or values[right - 1] == wanted:
        return [(values[right - 1], 1.0)]
    low, high = values[right - 1], values[right]
    share = (wanted - low) / (high - low)
    return [(low, 1 - share), (high, share)]


def _heads_of(row: Row) -> tuple[int, int]:
    return int(row["num_heads"]), int(row["num_key_value_heads"])


def _nearest_heads(rows: Sequence[Row], heads: float, kv_heads: float) -> tuple[int, int]:
    """The measured pair of head counts that is closest, first by their ratio."""
    pairs = sorted({_heads_of(row) for row in rows})
    return min(
        pairs,
        key=lambda pair: abs(math.log(pair[0] / pair[1] * kv_heads / heads)) + abs(math.log(pair[1] / kv_heads)),
    )


def _whole_tiles(rows: int) -> int:
    return rows if rows <= TILE else -(-rows // TILE) * TILE
