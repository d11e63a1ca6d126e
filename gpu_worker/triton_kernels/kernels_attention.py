"""Device code of paged attention: ragged chunks in tiles, decodes with their keys split, and the merge of the splits.

Shared by all: head h reads kv head h // GROUP; the heads of a group share one load of keys. Scores are kept in units
of log2, so that exp2 serves, and sums in float32. Keys past a row's length are never loaded, whatever lies there.
"""

import triton
import triton.language as tl


# Numbers that change with every batch: a variant for each that is 1 or a multiple of 16 would be compiled while streams
# wait.
@triton.jit(do_not_specialize=["first_row", "num_rows", "table_stride"])
def attend_tiles(
    queries,  # (tokens, heads, HEAD_DIM)
    keys,  # (num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM); values the same shape, strides of their own
    values,
    output,  # as queries
    query_starts,  # (rows + 1,) int32; tokens [query_starts[r], query_starts[r + 1]) are row r's
    kv_lens,  # (rows,) int32
    block_tables,  # (rows, ...) int32
    scale_log2,  # of scores: head_dim ** -0.5 * log2(e)
    first_row,  # rows before it are someone else's
    num_rows,
    table_stride,
    query_stride,
    query_head_stride,
    output_stride,
    output_head_stride,
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
    WINDOW: tl.constexpr,  # keys that a query sees, itself included; 0: all
):
    """Grid (tiles, kv_heads), with at least (tokens // TILE_QUERIES + rows) tiles; those without queries return."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    base = tl.load(query_starts + first_row)
    # Row r begins at tile (start of r) // TILE_QUERIES + r, which leaves each row room for a tile that is not full.
    low = num_rows * 0  # of its type
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        start = tl.load(query_starts + first_row + middle) - base
        if start // TILE_QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    row = first_row + low - 1
    query_start = tl.load(query_starts + row)
    query_len = tl.load(query_starts + row + 1) - query_start
    first_query = (tile - ((query_start - base) // TILE_QUERIES + low - 1)) * TILE_QUERIES
    if first_query >= query_len:
        return
    kv_len = tl.load(kv_lens + row)

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
    last_position = kv_len - query_len + tl.minimum(first_query + TILE_QUERIES, query_len) - 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(kv_len - query_len + first_query - WINDOW + 1, 0) // TILE_KEYS * TILE_KEYS
    table = block_tables + row.to(tl.int64) * table_stride
    for first_key in range(begin, last_position + 1, TILE_KEYS):
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
    output_at = token[:, None] * output_stride + head[:, None] * output_head_stride + dims[None, :]
    result = mean / total[:, None]
    tl.store(output + output_at, result.to(output.dtype.element_ty), mask=is_query[:, None])


@triton.jit(do_not_specialize=["table_stride"])
def attend_splits(
    queries,  # (rows, heads, HEAD_DIM): one query a row
    keys,
    values,
    output,  # (rows, heads, HEAD_DIM) if NUM_SPLITS is 1, else
    partial_means,  # (rows, heads, NUM_SPLITS, HEAD_DIM) float32, and
    partial_totals,  # (rows, heads, NUM_SPLITS, 2) float32: greatest score, sum of weights
    kv_lens,
    block_tables,
    scale_log2,
    num_heads,
    table_stride,
    query_stride,
    query_head_stride,
    output_stride,
    output_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Grid (rows, kv_heads, NUM_SPLITS): each takes an equal share of a row's keys."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    kv_len = tl.load(kv_lens + row)
    seen_from = 0
    if WINDOW > 0:
        seen_from = tl.maximum(kv_len - WINDOW, 0)
    first_tile = seen_from // TILE_KEYS
    num_tiles = tl.cdiv(kv_len, TILE_KEYS) - first_tile
    tiles_per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    begin = (first_tile + split * tiles_per_split) * TILE_KEYS
    end = tl.minimum(begin + tiles_per_split * TILE_KEYS, kv_len)

    member = tl.arange(0, TILE_HEADS)
    head = kv_head * GROUP + member
    is_head = member < GROUP
    dims = tl.arange(0, HEAD_DIM)
    query_at = row * query_stride + head[:, None] * query_head_stride + dims[None, :]
    row_queries = tl.load(queries + query_at, mask=is_head[:, None], other=0.0)  # (TILE_HEADS, HEAD_DIM)
    greatest = tl.full((TILE_HEADS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TILE_HEADS,), dtype=tl.float32)
    mean = tl.zeros((TILE_HEADS, HEAD_DIM), dtype=tl.float32)
    table = block_tables + row * table_stride
    for first_key in range(begin, end, TILE_KEYS):
        key = first_key + tl.arange(0, TILE_KEYS)
        is_key = key < kv_len
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        key_at = block * key_block_stride + (key % BLOCK_SIZE) * key_token_stride + kv_head * key_head_stride
        tile_keys = tl.load(keys + key_at[None, :] + dims[:, None], mask=is_key[None, :], other=0.0)
        scores = tl.dot(row_queries, tile_keys, input_precision="ieee") * scale_log2  # (TILE_HEADS, TILE_KEYS)
        is_seen = is_key & (key >= seen_from)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        # Every tile of a split holds a key that the query sees, so from the first one on this is finite.
        new_greatest = tl.maximum(greatest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_greatest[:, None])
        shrink = tl.exp2(greatest - new_greatest)
        total = total * shrink + tl.sum(weights, axis=1)
        value_at = block * value_block_stride + (key % BLOCK_SIZE) * value_token_stride + kv_head * value_head_stride
        tile_values = tl.load(values + value_at[:, None] + dims[None, :], mask=is_key[:, None], other=0.0)
        mean = mean * shrink[:, None]
        mean += tl.dot(weights.to(tile_values.dtype), tile_values, input_precision="ieee")
        greatest = new_greatest
    if NUM_SPLITS == 1:
        output_at = row * output_stride + head[:, None] * output_head_stride + dims[None, :]
        result = mean / total[:, None]
        tl.store(output + output_at, result.to(output.dtype.element_ty), mask=is_head[:, None])
    else:
        place = (row * num_heads + head) * NUM_SPLITS + split  # (TILE_HEADS,)
        tl.store(partial_means + place[:, None] * HEAD_DIM + dims[None, :], mean, mask=is_head[:, None])
        tl.store(partial_totals + place * 2, greatest, mask=is_head)
        tl.store(partial_totals + place * 2 + 1, total, mask=is_head)


@triton.jit
def merge_splits(
    partial_means,
    partial_totals,
    output,
    num_heads,
    output_stride,
    output_head_stride,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Grid (rows, heads). A split without keys has a greatest score of -inf and weighs nothing; the first has some."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, HEAD_DIM)
    place = (row * num_heads + head) * NUM_SPLITS + splits
    greatest = tl.load(partial_totals + place * 2)
    total = tl.load(partial_totals + place * 2 + 1)
    share = tl.exp2(greatest - tl.max(greatest, axis=0))  # (NUM_SPLITS,)
    means = tl.load(partial_means + place[:, None] * HEAD_DIM + dims[None, :])  # (NUM_SPLITS, HEAD_DIM)
    merged = tl.sum(means * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    output_at = row * output_stride + head * output_head_stride + dims
    tl.store(output + output_at, merged.to(output.dtype.element_ty))
