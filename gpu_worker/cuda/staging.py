"""Weights on their way to a device: through two pinned buffers, one filled while the device reads the other.

A device reads pageable memory through the driver's own small buffers, and the host waits meanwhile.
"""

import torch
from torch import Tensor

from gpu_worker.cuda.device import Device

BUFFER_BYTES = 64 << 20
"""Of each; large enough that starting a copy takes no time beside it."""
_NUM_BUFFERS = 2


class Staging:
    """Copies host tensors, of any size, to tensors on a device. For start-up: keeps its buffers while it lives."""

    def __init__(self, device: Device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._buffers = [device.host_buffer(buffer_bytes // 4) for _ in range(_NUM_BUFFERS)]
        self._read = [device.event() for _ in range(_NUM_BUFFERS)]  # By the device, to the end.
        self._num_pieces = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue the copy of source to target, contiguous and of the same number of elements, in target's dtype.

        When it returns source is no longer needed. No side stream: a device that loads has nothing else to do, and what
        reads target next comes after it by itself.
        """
        num_elements = self._buffers[0].nbytes // target.itemsize
        pieces = (torch.split(tensor, num_elements) for tensor in (target.view(-1), source.flatten()))
        for goal, piece in zip(*pieces, strict=True):
            index = self._num_pieces % _NUM_BUFFERS
            if self._num_pieces >= _NUM_BUFFERS:
                self._read[index].wait()  # A wait of the host, for the piece before the last one.
            staged = self._buffers[index].view(goal.dtype)[: len(goal)]
            staged.copy_(piece)
            goal.copy_(staged, non_blocking=True)
            self._read[index].record()
            self._num_pieces += 1
