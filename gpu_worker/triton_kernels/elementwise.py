"""The passes between matrix products, on tensors: rope with the KV write, residual with norm, SiLU with its product."""

import torch
from torch import Tensor

from gpu_worker.triton_kernels import kernels_elementwise as kernels

_TILE_HEADS = 8
_TILE_COLUMNS = 1024
_WIDE = 4096
"""Columns from which a row is worth eight warps."""


def rotate_and_store(
    projected: Tensor,
    *,
    positions: Tensor,
    slots: Tensor,
    cosine: Tensor,
    sine: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
) -> Tensor:
    """Turn queries and keys to their positions, store keys and values in the pool, and return the queries.

    Args:
        projected: (tokens, (heads + 2 * kv_heads) * head_dim), contiguous: queries, keys, values.
        positions: (tokens,) int64.
        slots: (tokens,) int64, see kv_cache.slots_of.
        cosine: (max_model_len, head_dim / 2), as sine.
        sine: See gpu_worker.models.rope.rotation_table.
        keys: (num_blocks, block_size, kv_heads, head_dim), contiguous; written at slots.
        values: As keys.
        num_heads: Of the queries.

    Returns:
        (tokens, heads, head_dim), rotated.
    """
    assert all(tensor.is_contiguous() for tensor in (projected, keys, values)), "kernels count on it"
    num_tokens, num_kv_heads, head_dim = projected.shape[0], keys.shape[2], keys.shape[3]
    queries = torch.empty(num_tokens, num_heads, head_dim, dtype=projected.dtype, device=projected.device)
    num_all_heads = num_heads + 2 * num_kv_heads
    kernels.rotate_and_store[(num_tokens, -(-num_all_heads // _TILE_HEADS))](
        projected,
        positions,
        slots,
        cosine,
        sine,
        queries,
        keys,
        values,
        num_heads,
        num_kv_heads,
        HEAD_DIM=head_dim,
        TILE_HEADS=_TILE_HEADS,
        num_warps=2,
    )
    return queries


def add_and_norm(residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add to residual in place, and return its RMS norm times weight.

    Args:
        residual: (tokens, width), contiguous.
        added: As residual; None leaves the residual as it is.
        weight: (width,).
        eps: Added to the mean square.
    """
    assert residual.is_contiguous(), "kernels count on it"
    assert added is None or added.is_contiguous(), "kernels count on it"
    num_tokens, width = residual.shape
    normed = torch.empty_like(residual)
    kernels.add_and_norm[(num_tokens,)](
        residual,
        residual if added is None else added,
        weight,
        normed,
        width,
        eps,
        HAS_ADDED=added is not None,
        WIDTH_PADDED=1 << (width - 1).bit_length(),
        num_warps=8 if width >= _WIDE else 4,
    )
    return normed


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (tokens, width), of (tokens, 2 * width), contiguous: gate, then up."""
    assert gate_up.is_contiguous(), "kernels count on it"
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    kernels.silu_and_multiply[(num_tokens, -(-width // _TILE_COLUMNS))](
        gate_up, output, width, TILE=_TILE_COLUMNS, num_warps=4
    )
    return output
