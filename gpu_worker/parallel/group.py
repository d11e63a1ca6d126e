"""What ranks do together, through torch.distributed: sums within a stage, and hand-overs from stage to stage.

Backends are used as objects, without torch's global default group: a rank has up to three (its stage, the hop before
and the hop after it), each of exactly the ranks that use it. They are gloo's on CPUs and NCCL's on CUDA devices.
Collectives block the thread that calls them, and raise RuntimeError when a peer is gone or timeout_s have passed.
"""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from gpu_worker.parallel.layout import Layout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# What torch.distributed takes over from its extension, its stubs do not say.
c10d: Any = dist

MAX_UNSENT = 2
"""Hidden states on their way to the next stage: one that it receives, and one that is ready when it comes back."""


class Group:
    """One rank's ties to the others. Used by one thread."""

    def __init__(self, store: "Store", layout: Layout, device: str, timeout_s: float, host: str = "127.0.0.1") -> None:
        """Meet the other ranks in store, which all share. Returns when all those that this rank talks to are there.

        Args:
            store: Where ranks find each other's addresses.
            layout: This rank's place.
            device: Of the tensors, such as cpu or cuda:0; its type decides the backend.
            timeout_s: How long a collective may take.
            host: Address of this machine by which the others reach it (gloo; NCCL chooses by itself).
        """
        self._layout = layout
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._unsent: list[tuple[Any, Tensor]] = []  # sends under way, with what they send

        def meet(name: str, rank: int, size: int) -> Any:
            return _new_backend(c10d.PrefixStore(name, store), rank, size, self._device.type, timeout_s, host)

        stage, tp_rank = layout.stage, layout.tp_rank
        self._stage = meet(f"stage-{stage}", tp_rank, layout.tp) if layout.tp > 1 else None
        self._before = meet(f"hop-{stage}-{tp_rank}", 1, 2) if not layout.is_first_stage else None
        self._after = meet(f"hop-{stage + 1}-{tp_rank}", 0, 2) if not layout.is_last_stage else None

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the stage's tensors, the same on each of its ranks. Written in place."""
        if self._stage is not None:
            self._stage.allreduce([tensor]).wait()
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the stage's first rank. Written in place on the others."""
        if self._stage is not None:
            options = c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._stage.broadcast([tensor], options).wait()
        return tensor

    def gather(self, part: Tensor, total: int) -> Tensor | None:
        """Return the stage's tensors side by side, (rows, total), on its first rank; None on the others.

        Args:
            part: (rows, columns), this rank's share of total (see Layout.columns); the longer shares come first.
            total: Columns of all ranks together.
        """
        if self._stage is None:
            return part
        layout = self._layout
        # Of one size, as gloo wants them: what a shorter share lacks is cut off again.
        width = -(-total // layout.tp)
        padded = functional.pad(part, (0, width - part.shape[1])).contiguous()
        options = c10d.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(padded) for _ in range(layout.tp)] if layout.leads_stage else []
        self._stage.gather([parts] if parts else [], [padded], options).wait()
        if not parts:
            return None
        num_longer = total % layout.tp or layout.tp
        return torch.cat([part[:, : width - (index >= num_longer)] for index, part in enumerate(parts)], dim=1)

    def send(self, tensor: Tensor) -> None:
        """Hand a tensor over to the next stage. Returns at once unless MAX_UNSENT are under way."""
        assert self._after is not None, "the last stage has none after it"
        while len(self._unsent) >= MAX_UNSENT:
            self._unsent.pop(0)[0].wait()
        self._unsent.append((self._after.send([tensor], 1, 0), tensor))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Wait for a tensor of the stage before."""
        assert self._before is not None, "the first stage has none before it"
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._before.recv([tensor], 0, 0).wait()
        return tensor


def _new_backend(store: "Store", rank: int, size: int, device_type: str, timeout_s: float, host: str) -> Any:
    if device_type == "cuda":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return c10d.ProcessGroupNCCL(store, rank, size, options)
    gloo = c10d.ProcessGroupGloo
    gloo_options = gloo._Options()
    gloo_options._timeout = timedelta(seconds=timeout_s)
    # An address of ours, not gloo's guess by the host's name: on one machine nothing need leave the loopback interface.
    gloo_options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, gloo_options)
