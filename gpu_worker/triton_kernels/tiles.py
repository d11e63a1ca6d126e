"""Tile shapes of our kernels: what compiles without spilling registers on sm_80 and sm_90."""

from dataclasses import dataclass

import torch

MAX_SPLITS = 16
"""Shares that a decode's keys are cut into at most; with 8 kv heads one row then keeps 128 multiprocessors busy."""

SPLIT_KEYS = 1024
"""Keys whose softmax is summed apart where sums must have one order: fewer make more partial results to keep and to
join, more leave fewer programs to share a long context."""
_MANY_OUTPUTS = 16384
"""From here on tiles of 128 outputs are enough for every multiprocessor; below, tiles of 64 make twice as many."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """One attention program's share of the work. Heads of a group lie side by side among a tile's rows."""

    rows: int  # queries times heads of a group, padded
    keys: int
    num_warps: int
    num_stages: int

    def queries(self, group: int) -> int:
        """Queries of one tile."""
        return self.rows // padded_group(group)


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """One matrix product program's share of the work."""

    rows: int
    outputs: int
    inputs: int  # of one step
    num_warps: int
    num_stages: int


def chunk_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    """Return the tiles of ragged chunks."""
    if dtype == torch.float32:  # Twice the bytes, and no tensor cores: for tests on a device.
        return Tiles(rows=32, keys=32, num_warps=4, num_stages=2)
    if head_dim > 128:
        # Larger ones spill on sm_80 and sm_90, and need more than the 99 KiB that there are on sm_86 and sm_89.
        return Tiles(rows=64, keys=32, num_warps=8, num_stages=3)
    # With 4 warps a tile of this size spills: at heads of 64 on sm_80, at heads of 128 everywhere. A program has a
    # multiprocessor to itself, so it must load its next keys itself while it multiplies. Triton shares the stages out
    # between a step's two loads, one of which waits for the other's block number: three leave keys that are asked for
    # as late as the step before has ended, five let them come a step ahead. 97 KiB on sm_8x, 129 on sm_90.
    return Tiles(rows=128, keys=64, num_warps=8, num_stages=5)


def decode_tiles(dtype: torch.dtype, group: int) -> Tiles:
    """Return the tiles of decodes. A matrix product takes no fewer than 16 rows."""
    rows = max(16, padded_group(group))
    if dtype == torch.float32:
        return Tiles(rows=rows, keys=32, num_warps=4, num_stages=2)
    # Four programs on a multiprocessor load and multiply in turn; with more stages there is room for three.
    return Tiles(rows=rows, keys=64, num_warps=4, num_stages=3)


def invariant_tiles(dtype: torch.dtype, head_dim: int, group: int) -> Tiles:
    """Return the tiles of attention with one order of sums: the same for decodes and chunks, so for both a compromise.

    64 rows are the fewest that Hopper's own matrix products take. A decode fills few of them, and waits for its keys.
    With 64 keys heads of 128 spill on sm_80, if there is a window.
    """
    num_stages = 2 if dtype == torch.float32 else 3
    return Tiles(
        rows=max(64, padded_group(group)), keys=32, num_warps=8 if head_dim > 128 else 4, num_stages=num_stages
    )


def product_tiles(dtype: torch.dtype, num_outputs: int) -> ProductTiles:
    """Return the tiles of matrix products with one order of sums: the same for any number of rows.

    A single row leaves most of a tile empty, and takes about as long as reading the weights does all the same.
    """
    if dtype == torch.float32:
        return ProductTiles(rows=32, outputs=64, inputs=32, num_warps=4, num_stages=2)
    if num_outputs >= _MANY_OUTPUTS:
        return ProductTiles(rows=128, outputs=128, inputs=64, num_warps=8, num_stages=3)
    return ProductTiles(rows=128, outputs=64, inputs=64, num_warps=4, num_stages=3)


def num_splits(num_rows: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Return how many programs share a decode's keys: a power of two that gives each multiprocessor two programs.

    Depends on nothing that varies inside a CUDA graph.
    """
    wanted = -(-2 * num_multiprocessors // max(1, num_rows * num_kv_heads))
    splits = 1
    while splits < wanted and splits < MAX_SPLITS:
        splits *= 2
    return splits


def padded_group(group: int) -> int:
    """Return the next power of two."""
    return 1 << (group - 1).bit_length()
