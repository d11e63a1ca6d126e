"""What torch.distributed does for ranks: its backends as objects, without its global default group.

They are gloo's on CPUs and NCCL's on CUDA devices. Of gloo's the calling thread waits for what it asks for, and gets a
RuntimeError when a peer is gone or its time is over. NCCL's are enqueued: what the thread enqueues on the current
stream afterwards waits for them on the device, and a timeout ends the process.
"""

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NCCL_ENVIRONMENT = {
    # Torch's watchdog waits four times this, a minute by default, between a timeout and the end of the process.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Nor does it keep a Python traceback of every collective.
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",  # its name in older versions
}
"""Settings of torch's that it reads when a group is made; what the operator has set stays."""

# What torch.distributed takes over from its extension, its stubs do not say.
c10d: Any = dist


class Collectives:
    """Of ranks that all take part in each, in the same order. Used by one thread."""

    def __init__(self, backend: Any, rank: int, num_ranks: int) -> None:
        """backend is a new_backend of these ranks; rank is this one's place among them."""
        self._backend = backend
        self._is_first = rank == 0
        self._num_ranks = num_ranks

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors. Written in place."""
        self._backend.allreduce([tensor]).wait()
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor. Written in place on the others."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._backend.broadcast([tensor], options).wait()
        return tensor

    def gather(self, part: Tensor, total: int) -> Tensor | None:
        """Return all ranks' tensors side by side, (rows, total), on the first one; None on the others.

        Args:
            part: (rows, columns), this rank's share of total, as equal as can be; the longer shares come first.
            total: Columns of all ranks together.
        """
        # Of one size, as gloo wants them: what a shorter share lacks is cut off again.
        width = -(-total // self._num_ranks)
        padded = functional.pad(part, (0, width - part.shape[1])).contiguous()
        options = c10d.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(padded) for _ in range(self._num_ranks)] if self._is_first else []
        self._backend.gather([parts] if parts else [], [padded], options).wait()
        if not parts:
            return None
        num_longer = total % self._num_ranks or self._num_ranks
        return torch.cat([part[:, : width - (index >= num_longer)] for index, part in enumerate(parts)], dim=1)


def new_backend(
    store: "Store", rank: int, num_ranks: int, device_type: str, timeout_s: float, host: str = "127.0.0.1"
) -> Any:
    """Meet num_ranks ranks in store, this one included; return their backend. On CUDA of the thread's current device.

    Args:
        store: Where they find each other's addresses.
        rank: This one's place among them.
        num_ranks: How many there are.
        device_type: Of the tensors: cpu or cuda.
        timeout_s: How long a collective may take.
        host: Address of this machine by which the others reach it (gloo; NCCL chooses by itself).
    """
    if device_type == "cuda":
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        nccl = c10d.ProcessGroupNCCL(store, rank, num_ranks, options)
        # Now, not with the first collective: that one may be captured in a graph.
        nccl.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        return nccl
    gloo = c10d.ProcessGroupGloo
    gloo_options = gloo._Options()
    gloo_options._timeout = timedelta(seconds=timeout_s)
    # An address of ours, not gloo's guess by the host's name: on one machine nothing need leave the loopback interface.
    gloo_options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, num_ranks, gloo_options)
