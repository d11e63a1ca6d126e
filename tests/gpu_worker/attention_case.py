"""A hybrid batch on a paged pool for kernels in Triton's interpreter, and what the plain reference makes of it."""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionSpec, BatchLayout, bind
from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.triton_kernels.tiles import Tiles

TOLERANCE = {
    torch.float32: 3e-6,
    torch.float16: 4e-3,  # weights are rounded to 11 bits before they meet the values
}
SMALL = Tiles(rows=16, keys=16, num_warps=4, num_stages=2)
"""Tiles small enough that short rows take several."""


@dataclass
class Case:
    """A batch on a shuffled pool whose unused blocks are NaN, and whose used blocks end in huge numbers."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    layout: BatchLayout
    spec: AttentionSpec

    @classmethod
    def make(
        cls,
        rows: list[tuple[int, int]],
        *,
        group: int = 4,
        head_dim: int = 64,
        block_size: int = 16,
        num_kv_heads: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> "Case":
        """Rows are (query_len, kv_len)."""
        generator = torch.Generator().manual_seed(len(rows))
        nums_blocks = [-(-kv_len // block_size) for _, kv_len in rows]
        free = list(range(sum(nums_blocks) + 5))
        random.Random(0).shuffle(free)
        shape = (len(free), block_size, num_kv_heads, head_dim)
        keys, values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
        tables = torch.empty(len(rows), max(nums_blocks), dtype=torch.int64)
        for index, (count, (_, kv_len)) in enumerate(zip(nums_blocks, rows, strict=True)):
            blocks, free = free[:count], free[count:]
            tables[index, :count] = torch.tensor(blocks)
            tables[index, count:] = blocks[-1]
            for pool in (keys, values):
                pool[blocks] = torch.randn(count, *shape[1:], generator=generator)
                pool[blocks[-1], kv_len - (count - 1) * block_size :] = 1e4
        num_heads = num_kv_heads * group
        return cls(
            queries=torch.randn(sum(row[0] for row in rows), num_heads, head_dim, generator=generator).to(dtype),
            keys=keys.to(dtype),
            values=values.to(dtype),
            layout=BatchLayout(
                query_lens=tuple(row[0] for row in rows), kv_lens=tuple(row[1] for row in rows), block_tables=tables
            ),
            spec=AttentionSpec(
                device="cpu",
                dtype=dtype,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
            ),
        )

    @property
    def query_starts(self) -> Tensor:
        return torch.tensor([0, *self.layout.query_lens]).cumsum(0).int()

    @property
    def kv_lens(self) -> Tensor:
        return torch.tensor(self.layout.kv_lens, dtype=torch.int32)

    def expected(self, window: int = 0, scale: float | None = None) -> Tensor:
        spec = replace(self.spec, window=window or None, scale=scale)
        return bind(ReferenceAttention(), self.layout, spec)(self.queries, self.keys, self.values)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
