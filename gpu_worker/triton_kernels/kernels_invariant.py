"""Device code whose sums have one order: for a row, whatever its neighbours, its chunk and the batch are.

A program's tile has one shape for every batch, and keys and inputs are taken in steps counted from 0. A row's place in
its tile decides which lanes compute it, never what is added to what. Numbers that vary from batch to batch never choose
a variant of a kernel, which might round otherwise.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "first_split", "num_splits", "table_stride"])
def attend_split(
    queries,  # (tokens, heads, HEAD_DIM)
    keys,  # (num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM); values the same shape, strides of their own
    values,
    means,  # (tokens, heads, num_splits, HEAD_DIM) float32, written: of values by their weights, not divided yet
    totals,  # (tokens, heads, num_splits, 2) float32, written: greatest score, sum of weights
    query_starts,  # (rows + 1,) int32; tokens [query_starts[r], query_starts[r + 1]) are row r's
    kv_lens,  # (rows,) int32
    block_tables,  # (rows, ...) int32
    scale_log2,  # of scores: head_dim ** -0.5 * log2(e)
    num_rows,
    first_split,
    num_splits,
    num_heads,
    table_stride,
    query_stride,
    query_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,  # a multiple of TILE_KEYS
    WINDOW: tl.constexpr,  # keys that a query sees, itself included; 0: all
):
    """Grid (tiles, kv_heads, num_splits): the softmax over the keys of one split, for the queries of one tile.

    Tiles as of kernels_attention.attend_tiles. A decode is a tile of one query: the same code, so that it multiplies
    and adds as a chunk does. Keys that some queries of a tile do not see yet, or no longer, change no bit of theirs.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    # Row r begins at tile (start of r) // TILE_QUERIES + r, which leaves each row room for a tile that is not full.
    low = num_rows * 0  # of its type
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        start = tl.load(query_starts + middle)
        if start // TILE_QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    query_start = tl.load(query_starts + row)
    query_len = tl.load(query_starts + row + 1) - query_start
    first_query = (tile - (query_start // TILE_QUERIES + row)) * TILE_QUERIES
    if first_query >= query_len:
        return
    kv_len = tl.load(kv_lens + row)
    last_position = kv_len - query_len + tl.minimum(first_query + TILE_QUERIES, query_len) - 1
    begin = (first_split + split) * SPLIT_KEYS
    if begin > last_position:
        return
    end = tl.minimum(begin + SPLIT_KEYS, last_position + 1)
    if WINDOW > 0:
        begin = tl.maximum(begin, (kv_len - query_len + first_query - WINDOW + 1) // TILE_KEYS * TILE_KEYS)

    TILE: tl.constexpr = TILE_QUERIES * GROUP_PADDED
    lanes = tl.arange(0, TILE)
    query = first_query + lanes // GROUP_PADDED  # (TILE,) in the row
    member = lanes % GROUP_PADDED
    head = kv_head * GROUP + member
    dims = tl.arange(0, HEAD_DIM)
    is_query = (query < query_len) & (member < GROUP)
    token = (query_start + query).to(tl.int64)
    query_at = token[:, None] * query_stride + head[:, None] * query_head_stride + dims[None, :]
    tile_queries = tl.load(queries + query_at, mask=is_query[:, None], other=0.0)  # (TILE, HEAD_DIM)
    position = kv_len - query_len + query  # the last query sees every key

    greatest = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TILE,), dtype=tl.float32)
    mean = tl.zeros((TILE, HEAD_DIM), dtype=tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    for first_key in range(begin, end, TILE_KEYS):
        key = first_key + tl.arange(0, TILE_KEYS)
        is_key = key <= last_position
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        key_at = block * key_block_stride + (key % BLOCK_SIZE) * key_token_stride + kv_head * key_head_stride
        tile_keys = tl.load(keys + key_at[None, :] + dims[:, None], mask=is_key[None, :], other=0.0)
        scores = tl.dot(tile_queries, tile_keys, input_precision="ieee") * scale_log2  # (TILE, TILE_KEYS)
        is_seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(scores, axis=1))
        # A query that has seen nothing yet has no greatest score, and -inf less -inf would be NaN.
        anchor = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(greatest - anchor)
        total = total * shrink + tl.sum(weights, axis=1)
        value_at = block * value_block_stride + (key % BLOCK_SIZE) * value_token_stride + kv_head * value_head_stride
        tile_values = tl.load(values + value_at[:, None] + dims[None, :], mask=is_key[:, None], other=0.0)
        mean = mean * shrink[:, None]
        mean += tl.dot(weights.to(tile_values.dtype), tile_values, input_precision="ieee")
        greatest = new_greatest
    place = (token * num_heads + head) * num_splits + split  # (TILE,)
    tl.store(means + place[:, None] * HEAD_DIM + dims[None, :], mean, mask=is_query[:, None])
    tl.store(totals + place * 2, greatest, mask=is_query)
    tl.store(totals + place * 2 + 1, total, mask=is_query)


@triton.jit(do_not_specialize=["num_rows", "first_split", "num_splits"])
def join_splits(
    means,  # of attend_split
    totals,
    joined_means,  # (tokens, heads, HEAD_DIM) float32: of the splits before first_split, read unless it is 0; written
    joined_totals,  # (tokens, heads, 2) float32, likewise
    output,  # (tokens, heads, HEAD_DIM), written; of use after the last splits
    query_starts,
    kv_lens,
    num_rows,
    first_split,
    num_splits,
    num_heads,
    output_stride,
    output_head_stride,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """Grid (tokens, tiles of heads): adds splits to those before them, one after another."""
    token = tl.program_id(0)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    is_head = head < num_heads
    low = num_rows * 0  # of its type
    high = num_rows
    while low < high:  # The first row that begins after the token.
        middle = (low + high) // 2
        if tl.load(query_starts + middle) <= token:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    position = tl.load(kv_lens + row) - tl.load(query_starts + row + 1) + token
    dims = tl.arange(0, HEAD_DIM)
    place = token.to(tl.int64) * num_heads + head  # (TILE_HEADS,)
    mean_at = place[:, None] * HEAD_DIM + dims[None, :]
    # What is loaded is nothing where there is nothing before these splits.
    is_joined = is_head & (head * 0 < first_split)
    greatest = tl.load(joined_totals + place * 2, mask=is_joined, other=float("-inf"))
    total = tl.load(joined_totals + place * 2 + 1, mask=is_joined, other=0.0)
    mean = tl.load(joined_means + mean_at, mask=is_joined[:, None], other=0.0)  # (TILE_HEADS, HEAD_DIM)
    end = tl.minimum(num_splits, position // SPLIT_KEYS + 1 - first_split)
    for split in range(end):
        part = place * num_splits + split
        part_at = part[:, None] * HEAD_DIM + dims[None, :]
        next_greatest = tl.load(totals + part * 2, mask=is_head, other=float("-inf"))
        new_greatest = tl.maximum(greatest, next_greatest)
        # A window may hide all of the first splits.
        anchor = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        shrink = tl.exp2(greatest - anchor)
        share = tl.exp2(next_greatest - anchor)
        total = total * shrink + tl.load(totals + part * 2 + 1, mask=is_head, other=0.0) * share
        next_mean = tl.load(means + part_at, mask=is_head[:, None], other=0.0)
        mean = mean * shrink[:, None] + next_mean * share[:, None]
        greatest = new_greatest
    tl.store(joined_totals + place * 2, greatest, mask=is_head)
    tl.store(joined_totals + place * 2 + 1, total, mask=is_head)
    tl.store(joined_means + mean_at, mean, mask=is_head[:, None])
    output_at = token.to(tl.int64) * output_stride + head[:, None] * output_head_stride + dims[None, :]
    result = mean / tl.where(is_head, total, 1.0)[:, None]
    tl.store(output + output_at, result.to(output.dtype.element_ty), mask=is_head[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    inputs,  # (num_rows, num_inputs), contiguous
    weights,  # (num_outputs, num_inputs), contiguous
    output,  # (num_rows, num_outputs), contiguous, written
    num_rows,
    num_inputs,
    num_outputs,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # whether num_inputs is a multiple of TILE_INPUTS
):
    """Grid (tiles of rows, tiles of outputs): an output is one sum, in the order of its inputs."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    step = tl.arange(0, TILE_INPUTS)
    is_row = row < num_rows
    is_column = column < num_outputs
    input_at = inputs + row.to(tl.int64)[:, None] * num_inputs + step[None, :]
    weight_at = weights + column.to(tl.int64)[None, :] * num_inputs + step[:, None]
    sums = tl.zeros((TILE_ROWS, TILE_OUTPUTS), dtype=tl.float32)
    for first in range(0, num_inputs, TILE_INPUTS):
        is_input = is_row[:, None]
        is_weight = is_column[None, :]
        if not IS_WHOLE:
            is_input = is_input & (first + step[None, :] < num_inputs)
            is_weight = is_weight & (first + step[:, None] < num_inputs)
        tile_inputs = tl.load(input_at, mask=is_input, other=0.0)  # (TILE_ROWS, TILE_INPUTS)
        tile_weights = tl.load(weight_at, mask=is_weight, other=0.0)  # (TILE_INPUTS, TILE_OUTPUTS)
        sums = tl.dot(tile_inputs, tile_weights, sums, input_precision="ieee")
        input_at += TILE_INPUTS
        weight_at += TILE_INPUTS
    output_at = row.to(tl.int64)[:, None] * num_outputs + column[None, :]
    tl.store(output + output_at, sums.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
