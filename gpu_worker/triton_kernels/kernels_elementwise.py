"""Device code of what lies between the matrix products: one pass over memory each."""

import triton
import triton.language as tl


@triton.jit
def rotate_and_store(
    projected,  # (tokens, (heads + 2 * kv_heads) * HEAD_DIM), contiguous: queries, keys, values
    positions,  # (tokens,) int64
    slots,  # (tokens,) int64: where in the pool a token's KV goes
    cosine,  # (positions, HEAD_DIM / 2), as sine
    sine,
    queries,  # (tokens, heads, HEAD_DIM), written
    keys,  # the pool: (num_blocks * BLOCK_SIZE, kv_heads, HEAD_DIM) seen flat, written at slots
    values,
    num_heads,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    """Grid (tokens, tiles of heads). Pairs dimension i with i + HEAD_DIM / 2, as Hugging Face does."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)  # over queries, keys and values
    HALF: tl.constexpr = HEAD_DIM // 2
    pair = tl.arange(0, HALF)
    num_turned = num_heads + num_kv_heads
    is_head = head < num_turned + num_kv_heads
    source = (token * (num_turned + num_kv_heads) + head[:, None]) * HEAD_DIM + pair[None, :]
    first = tl.load(projected + source, mask=is_head[:, None], other=0.0).to(tl.float32)  # (TILE_HEADS, HALF)
    second = tl.load(projected + source + HALF, mask=is_head[:, None], other=0.0).to(tl.float32)
    angle = tl.load(positions + token) * HALF + pair
    cos = tl.load(cosine + angle).to(tl.float32)[None, :]
    sin = tl.load(sine + angle).to(tl.float32)[None, :]
    is_turned = (head < num_turned)[:, None]
    new_first = tl.where(is_turned, first * cos - second * sin, first).to(queries.dtype.element_ty)
    new_second = tl.where(is_turned, second * cos + first * sin, second).to(queries.dtype.element_ty)

    is_query = (head < num_heads)[:, None]
    query_at = (token * num_heads + head[:, None]) * HEAD_DIM + pair[None, :]
    tl.store(queries + query_at, new_first, mask=is_query)
    tl.store(queries + query_at + HALF, new_second, mask=is_query)
    slot = tl.load(slots + token)
    kv_head = tl.where(head < num_turned, head - num_heads, head - num_turned)
    kv_at = (slot * num_kv_heads + kv_head[:, None]) * HEAD_DIM + pair[None, :]
    is_key = ((head >= num_heads) & (head < num_turned))[:, None]
    tl.store(keys + kv_at, new_first, mask=is_key)
    tl.store(keys + kv_at + HALF, new_second, mask=is_key)
    is_value = ((head >= num_turned) & is_head)[:, None]
    tl.store(values + kv_at, new_first, mask=is_value)
    tl.store(values + kv_at + HALF, new_second, mask=is_value)


@triton.jit
def add_and_norm(
    residual,  # (tokens, width), read and written
    added,  # (tokens, width)
    weight,  # (width,)
    normed,  # (tokens, width), written
    width,
    eps,
    HAS_ADDED: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    """Grid (tokens,). Rounds where separate operations would: after the sum, and before the weight."""
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, WIDTH_PADDED)
    is_column = column < width
    row = tl.load(residual + at + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_ADDED:
        row += tl.load(added + at + column, mask=is_column, other=0.0).to(tl.float32)
        rounded = row.to(residual.dtype.element_ty)
        tl.store(residual + at + column, rounded, mask=is_column)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / width + eps)
    scaled = (row * scale).to(normed.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normed + at + column, (scaled * factor).to(normed.dtype.element_ty), mask=is_column)


@triton.jit
def silu_and_multiply(gate_up, output, width, TILE: tl.constexpr):
    """Grid (tokens, tiles of width). gate_up is (tokens, 2 * width), output (tokens, width)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < width
    gate = tl.load(gate_up + token * 2 * width + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + column, mask=is_column, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + token * width + column, (activated * up).to(output.dtype.element_ty), mask=is_column)
