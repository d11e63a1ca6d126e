"""Memory in huge pages: a decode reads all weights and a strewn KV cache, and address look-ups are a part of its wait.

On two virtual cores of an EPYC (Zen 3), products of one row read packed weights at 9.5 GB/s a core from 4 KiB pages and
at 12.5 from pages of 2 MiB; pieces of 2 KiB at random places, as KV blocks are, at 4.5 and 7.0.
"""

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
REGION_BYTES = 64 << 20
"""An arena's regions; memory is taken as pages are first written, so the end of the last one costs nothing."""
MADV_POPULATE_WRITE = 23
"""Takes pages as if they were written, and leaves in them what is there."""
LEAST_PRIORITY = 19
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


def take_pages_of(memory: Iterable[Tensor]) -> threading.Thread:
    """Take the pages of huge_zeros before anybody writes there, in a thread that runs when no other wants the core.

    Who writes to a page first waits for it, and the layers of a KV pool come to their next pages in the same iteration:
    60 of 2 MiB for SmolLM2, which take 240 ms on a virtual machine that must ask its host for memory.
    """
    # The whole region of each, whatever part and order of dimensions the tensor shows of it.
    regions = [tensor.untyped_storage() for tensor in memory]
    thread = threading.Thread(target=_take_pages, args=(regions,), name="pages", daemon=True)
    thread.start()
    return thread


def _take_pages(regions: list[torch.UntypedStorage]) -> None:
    if sys.platform != "linux":
        return
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # A piece of each in turn: what is used first lies at the beginning.
    for offset in range(0, max((region.nbytes() for region in regions), default=0), HUGE_PAGE_BYTES):
        for region in regions:
            num_bytes = min(HUGE_PAGE_BYTES, region.nbytes() - offset)
            if num_bytes > 0 and madvise(region.data_ptr() + offset, num_bytes, MADV_POPULATE_WRITE) != 0:
                return  # A kernel before 5.14, or no memory left: pages are taken when first written.


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
