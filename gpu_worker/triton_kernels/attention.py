"""Paged attention on tensors: chooses tiles and splits, and launches the kernels of kernels_attention."""

import math

import torch
from torch import Tensor

from gpu_worker.triton_kernels import kernels_attention as kernels
from gpu_worker.triton_kernels.tiles import Tiles, chunk_tiles, decode_tiles, padded_group


def attend_chunks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    *,
    query_starts: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    first_row: int = 0,
    window: int = 0,
    scale: float | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Compute causal attention of the rows from first_row on, each with any number of queries, none included.

    Args:
        queries: (tokens, heads, head_dim), of the whole batch; the last dimension contiguous, as in all below.
        keys: (num_blocks, block_size, kv_heads, head_dim).
        values: As keys.
        output: As queries; written where those rows are.
        query_starts: (rows + 1,) int32 of the whole batch.
        kv_lens: (rows,) int32, the queries' own tokens included.
        block_tables: (rows, width) int32; entries past a row's length are not read.
        first_row: Rows before it are left alone.
        window: Keys that a query sees, itself included; 0 is all.
        scale: Of scores; None is 1 / sqrt(head_dim).
        tiles: Other than the usual ones.
    """
    _, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    tiles = tiles or chunk_tiles(queries.dtype, head_dim)
    num_rows = kv_lens.shape[0] - first_row
    # A bound that needs no look at the device: the rows before first_row have one query each.
    num_tiles = (queries.shape[0] - first_row) // tiles.queries(group) + num_rows
    kernels.attend_tiles[(num_tiles, num_kv_heads)](
        queries,
        keys,
        values,
        output,
        query_starts,
        kv_lens,
        block_tables,
        scale_log2(head_dim, scale),
        first_row,
        num_rows,
        block_tables.stride(0),
        queries.stride(0),
        queries.stride(1),
        output.stride(0),
        output.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        BLOCK_SIZE=keys.shape[1],
        HEAD_DIM=head_dim,
        GROUP=group,
        GROUP_PADDED=padded_group(group),
        TILE_QUERIES=tiles.queries(group),
        TILE_KEYS=tiles.keys,
        WINDOW=window,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def attend_decodes(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    *,
    kv_lens: Tensor,
    block_tables: Tensor,
    num_splits: int,
    window: int = 0,
    scale: float | None = None,
) -> None:
    """Compute attention of rows with one query each; every row has at least one key.

    Args:
        queries: (rows, heads, head_dim).
        keys: (num_blocks, block_size, kv_heads, head_dim).
        values: As keys.
        output: As queries, written.
        kv_lens: (rows,) int32, each at least 1.
        block_tables: (rows, width) int32.
        num_splits: Programs that share a row's keys; a power of two.
        window: Keys that a query sees, itself included; 0 is all.
        scale: Of scores; None is 1 / sqrt(head_dim).
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[2]
    tiles = decode_tiles(queries.dtype, num_heads // num_kv_heads)
    means = totals = output  # Not touched where one program has all of a row's keys.
    if num_splits > 1:
        means = torch.empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32, device=queries.device)
        totals = torch.empty(num_rows, num_heads, num_splits, 2, dtype=torch.float32, device=queries.device)
    kernels.attend_splits[(num_rows, num_kv_heads, num_splits)](
        queries,
        keys,
        values,
        output,
        means,
        totals,
        kv_lens,
        block_tables,
        scale_log2(head_dim, scale),
        num_heads,
        block_tables.stride(0),
        queries.stride(0),
        queries.stride(1),
        output.stride(0),
        output.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        BLOCK_SIZE=keys.shape[1],
        HEAD_DIM=head_dim,
        GROUP=num_heads // num_kv_heads,
        TILE_HEADS=tiles.rows,
        TILE_KEYS=tiles.keys,
        WINDOW=window,
        NUM_SPLITS=num_splits,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if num_splits > 1:
        kernels.merge_splits[(num_rows, num_heads)](
            means,
            totals,
            output,
            num_heads,
            output.stride(0),
            output.stride(1),
            HEAD_DIM=head_dim,
            NUM_SPLITS=num_splits,
            num_warps=4,
        )


def scale_log2(head_dim: int, scale: float | None) -> float:
    """Return the factor of scores whose powers of two are weights; scale is None for the usual one."""
    return math.log2(math.e) * (1 / math.sqrt(head_dim) if scale is None else scale)
