"""A back end's first batch, compared with the reference: catches a build for another GPU or another torch."""

from typing import Any

import torch

from gpu_worker.attention.base import AttentionBackend, AttentionSpec, BatchLayout, bind
from gpu_worker.attention.reference import ReferenceAttention

MAX_ERROR = 1e-2
"""Relative. bfloat16 is off by 2e-3 to 4e-3 at these lengths; a wrong mask or a wrong block by 1e-1 and more."""
_ROWS = ((1, 70), (1, 300), (40, 90), (19, 19))
"""(query_len, kv_len): decodes, a chunk with context, and one without."""


def smoke_test(backend: AttentionBackend[Any], spec: AttentionSpec) -> str | None:
    """Run a small hybrid batch through backend; return what is wrong with it, or None. Takes milliseconds, or the
    seconds that the kernels need to compile."""
    try:
        error = relative_error(backend, spec)
    except Exception as failure:
        # Whatever it is: the driver's, another signature than ours, or of Triton, whose errors (more shared memory than
        # there is, a compiler that fails) have no base in common with those.
        return f"its first batch failed: {str(failure).splitlines()[0] if str(failure) else type(failure).__name__}"
    if not error < MAX_ERROR:  # NaN is not below anything.
        return f"its first batch was off by {error:.1%} of the reference"
    return None


def relative_error(backend: AttentionBackend[Any], spec: AttentionSpec) -> float:
    """Return how far backend is from the reference on a hybrid batch in a pool whose unused blocks are NaN."""
    generator = torch.Generator().manual_seed(0)
    nums_blocks = [-(-kv_len // spec.block_size) for _, kv_len in _ROWS]
    order = torch.randperm(sum(nums_blocks) + 2, generator=generator)
    shape = (len(order), spec.block_size, spec.num_kv_heads, spec.head_dim)
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    tables = torch.zeros(len(_ROWS), max(nums_blocks), dtype=torch.int64)
    num_used = 0
    for row, count in enumerate(nums_blocks):
        blocks = order[num_used : num_used + count]
        tables[row, :count], tables[row, count:] = blocks, blocks[-1]
        keys[blocks] = torch.randn(count, *shape[1:], generator=generator)
        values[blocks] = torch.randn(count, *shape[1:], generator=generator)
        num_used += count
    num_tokens = sum(query_len for query_len, _ in _ROWS)
    queries = torch.randn(num_tokens, spec.num_heads, spec.head_dim, generator=generator)
    layout = BatchLayout(
        query_lens=tuple(query_len for query_len, _ in _ROWS),
        kv_lens=tuple(kv_len for _, kv_len in _ROWS),
        block_tables=tables.to(spec.device),
    )
    pools = (queries, keys, values)
    on_device = [tensor.to(device=spec.device, dtype=spec.dtype) for tensor in pools]
    expected = bind(ReferenceAttention(), layout, spec)(*on_device).float()
    attended = bind(backend, layout, spec)(*on_device).float()
    return float((attended - expected).norm() / expected.norm())
