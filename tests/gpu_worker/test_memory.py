"""Memory in huge pages: pieces of an arena, and what keeps them."""

import gc
import os
from pathlib import Path

import torch

from gpu_worker.memory import ALIGNMENT, HUGE_PAGE_BYTES, REGION_BYTES, Arena, huge_zeros, take_pages_of


def test_memory_is_zeros_that_begin_with_a_huge_page() -> None:
    memory = huge_zeros(3 * HUGE_PAGE_BYTES + 5)
    assert memory.shape == (3 * HUGE_PAGE_BYTES + 5,)
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not memory.any()


def resident_bytes() -> int:
    """Memory of this process that is there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pages_are_taken_before_they_are_written_and_what_was_written_stays() -> None:
    size = 50 * HUGE_PAGE_BYTES
    pool = [huge_zeros(size).view(50, 2, -1).permute(1, 0, 2) for _ in range(2)]
    pool[1][0, 49, 7] = 5
    before = resident_bytes()
    take_pages_of(pool).join()
    assert resident_bytes() - before > 1.9 * size
    assert int(pool[0].count_nonzero()) == 0
    assert int(pool[1].count_nonzero()) == 1


def test_pieces_of_an_arena_are_aligned_and_apart_and_outlive_it() -> None:
    arena = Arena()
    sizes = [1, ALIGNMENT, 1000, REGION_BYTES - 500, 7, REGION_BYTES + 1, 300]  # Two of them need regions of their own.
    pieces = [arena.take(size) for size in sizes]
    for number, piece in enumerate(pieces):
        piece.fill_(number + 1)
    del arena
    gc.collect()
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert piece.shape == (size,)
        assert piece.data_ptr() % ALIGNMENT == 0
        assert torch.equal(piece[[0, -1]], torch.full((2,), number + 1, dtype=torch.uint8))
        assert int(piece.max()) == int(piece.min()) == number + 1
