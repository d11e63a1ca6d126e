"""Memory in huge pages: a decode reads all weights and a strewn KV cache, and address look-ups are a part of its wait.

On two virtual cores of an EPYC (Zen 3), products of one row read packed weights at 9.5 GB/s a core from 4 KiB pages and
at 12.5 from pages of 2 MiB; pieces of 2 KiB at random places, as KV blocks are, at 4.5 and 7.0.
"""

import contextlib
import ctypes
import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
REGION_BYTES = 64 << 20
"""An arena's regions; memory is taken as pages are first written, so the end of the last one costs nothing."""
ALIGNMENT = 64
"""A cache line, and a vector of any instruction set."""


def huge_zeros(num_bytes: int) -> Tensor:
    """Return (num_bytes,) uint8 zeros in huge pages, where the system has them; each is taken when first written."""
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux.
        with contextlib.suppress(OSError):  # A kernel without them: small pages serve, more slowly.
            region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)  # Keeps the region.
    offset = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[offset : offset + num_bytes]


def give_back_freed() -> None:
    """Return to the system what loading has freed: the C library keeps it, some 200 MB for SmolLM2, for later."""
    with contextlib.suppress(AttributeError):  # Not glibc.
        ctypes.CDLL(None).malloc_trim(0)


class Arena:
    """Many small pieces of memory in few regions, each of which lives as long as any piece of it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return (num_bytes,) uint8, zeros, aligned for vectors."""
        padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if padded > len(self._rest):
            self._rest = huge_zeros(max(padded, REGION_BYTES))
        piece, self._rest = self._rest[:num_bytes], self._rest[padded:]
        return piece
