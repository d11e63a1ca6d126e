"""Attention and matrix products whose results depend on a row alone, to the bit: launches of kernels_invariant.

What varies from batch to batch decides only how many programs there are, and which of them computes a row.
"""

import torch
from torch import Tensor

from gpu_worker.triton_kernels import kernels_invariant as kernels
from gpu_worker.triton_kernels.attention import scale_log2
from gpu_worker.triton_kernels.tiles import (
    SPLIT_KEYS,
    ProductTiles,
    Tiles,
    invariant_tiles,
    padded_group,
    product_tiles,
)

SCRATCH_BYTES = 128 << 20
"""For partial results: four splits of 2,048 tokens of 32 heads of 128. Longer contexts take several rounds."""

_TILE_HEADS = 8


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    *,
    query_starts: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    max_kv_len: int,
    window: int = 0,
    scale: float | None = None,
    tiles: Tiles | None = None,
    split_keys: int = SPLIT_KEYS,
    scratch_bytes: int = SCRATCH_BYTES,
) -> None:
    """Compute causal attention of rows with any number of queries each, none included.

    Args:
        queries: (tokens, heads, head_dim); the last dimension contiguous, as in all below.
        keys: (num_blocks, block_size, kv_heads, head_dim).
        values: As keys.
        output: As queries, written.
        query_starts: (rows + 1,) int32.
        kv_lens: (rows,) int32, the queries' own tokens included.
        block_tables: (rows, width) int32; entries past a row's length are not read.
        max_kv_len: No row is longer.
        window: Keys that a query sees, itself included; 0 is all.
        scale: Of scores; None is 1 / sqrt(head_dim).
        tiles: Other than the usual ones, for tests, as the next two.
        split_keys: Keys whose softmax is summed apart from the rest.
        scratch_bytes: For partial results, whose splits take several rounds where they are more.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads, num_rows = keys.shape[2], kv_lens.shape[0]
    group = num_heads // num_kv_heads
    tiles = tiles or invariant_tiles(queries.dtype, head_dim, group)
    assert split_keys % tiles.keys == 0, "a split begins with a tile"
    num_heads_in_all = num_tokens * num_heads
    max_splits = -(-max_kv_len // split_keys)
    splits_per_round = max(1, scratch_bytes // (4 * num_heads_in_all * head_dim))
    # As large as for the longest contexts, so that start-up, which sizes the KV pool by its peak, has seen the most.
    means = queries.new_empty(splits_per_round * num_heads_in_all * head_dim, dtype=torch.float32)
    totals = queries.new_empty(splits_per_round * num_heads_in_all * 2, dtype=torch.float32)
    joined_means = queries.new_empty(num_tokens, num_heads, head_dim, dtype=torch.float32)
    joined_totals = queries.new_empty(num_tokens, num_heads, 2, dtype=torch.float32)
    for first_split in range(0, max_splits, splits_per_round):
        num_splits = min(splits_per_round, max_splits - first_split)
        # A bound that needs no look at the device: each row may end with a tile that is not full.
        num_tiles = num_tokens // tiles.queries(group) + num_rows
        kernels.attend_split[(num_tiles, num_kv_heads, num_splits)](
            queries,
            keys,
            values,
            means,
            totals,
            query_starts,
            kv_lens,
            block_tables,
            scale_log2(head_dim, scale),
            num_rows,
            first_split,
            num_splits,
            num_heads,
            block_tables.stride(0),
            queries.stride(0),
            queries.stride(1),
            *keys.stride()[:3],
            *values.stride()[:3],
            BLOCK_SIZE=keys.shape[1],
            HEAD_DIM=head_dim,
            GROUP=group,
            GROUP_PADDED=padded_group(group),
            TILE_QUERIES=tiles.queries(group),
            TILE_KEYS=tiles.keys,
            SPLIT_KEYS=split_keys,
            WINDOW=window,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        kernels.join_splits[(num_tokens, -(-num_heads // _TILE_HEADS))](
            means,
            totals,
            joined_means,
            joined_totals,
            output,
            query_starts,
            kv_lens,
            num_rows,
            first_split,
            num_splits,
            num_heads,
            output.stride(0),
            output.stride(1),
            HEAD_DIM=head_dim,
            TILE_HEADS=_TILE_HEADS,
            SPLIT_KEYS=split_keys,
            num_warps=4,
        )


def linear(inputs: Tensor, weights: Tensor, output: Tensor | None = None, tiles: ProductTiles | None = None) -> Tensor:
    """Return inputs times the transpose of weights, (rows, outputs), in output where it is given.

    Args:
        inputs: (rows, inputs), contiguous, as all of them.
        weights: (outputs, inputs).
        output: (rows, outputs), written.
        tiles: Other than the usual ones, for tests.
    """
    (num_rows, num_inputs), num_outputs = inputs.shape, weights.shape[0]
    if output is None:
        output = torch.empty(num_rows, num_outputs, dtype=inputs.dtype, device=inputs.device)
    assert inputs.is_contiguous(), "kernels count on it"
    assert weights.is_contiguous(), "kernels count on it"
    assert output.is_contiguous(), "kernels count on it"
    tiles = tiles or product_tiles(inputs.dtype, num_outputs)
    # Neighbouring programs share a tile of weights, of which there is more than of inputs.
    kernels.multiply[(-(-num_rows // tiles.rows), -(-num_outputs // tiles.outputs))](
        inputs,
        weights,
        output,
        num_rows,
        num_inputs,
        num_outputs,
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tiles.outputs,
        TILE_INPUTS=tiles.inputs,
        IS_WHOLE=num_inputs % tiles.inputs == 0,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return output
