"""One rank's ties to the others: sums within a stage, and hand-overs from stage to stage.

A rank has up to four: its stage, the hops before and after it, and the way back from the last stage to the first; each
of exactly the ranks that use it (see collectives).
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpu_worker.parallel.collectives import Collectives, c10d, new_backend
from gpu_worker.parallel.layout import Layout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MAX_UNSENT = 2
"""Tensors on their way over a hop: one that the other end receives, and one that is ready when it comes back."""


class Group:
    """One rank's ties to the others. Used by one thread, which has made layout.rank's device the current one."""

    def __init__(
        self,
        store: "Store | None",
        layout: Layout,
        device: torch.device | str,
        timeout_s: float,
        host: str = "127.0.0.1",
        *,
        has_way_back: bool = False,
    ) -> None:
        """Meet the other ranks in store, which all share. Returns when all those that this rank talks to are there.

        Args:
            store: Where ranks find each other's addresses; None for a rank that is the only one.
            layout: This rank's place.
            device: Of the tensors, such as cpu or cuda:0; its type decides the backend.
            timeout_s: How long a collective may take.
            host: Address of this machine by which the others reach it (gloo; NCCL chooses by itself).
            has_way_back: Whether the last stage's tokens come back to the first one's device (see send_back).
        """
        self.layout = layout
        self._device = torch.device(device)
        self._store = store
        self._sends: dict[str, list[tuple[Any, Tensor]]] = {}  # under way, by hop, with what they send

        def meet(name: str, rank: int, size: int) -> Any:
            assert store is not None, "several ranks have a store"
            return new_backend(c10d.PrefixStore(name, store), rank, size, self._device.type, timeout_s, host)

        stage, tp_rank = layout.stage, layout.tp_rank
        self._stage: Collectives | None = None
        if layout.tp > 1:
            self._stage = Collectives(meet(f"stage-{stage}", tp_rank, layout.tp), tp_rank, layout.tp)
        self._before = meet(f"hop-{stage}-{tp_rank}", 1, 2) if not layout.is_first_stage else None
        self._after = meet(f"hop-{stage + 1}-{tp_rank}", 0, 2) if not layout.is_last_stage else None
        self._back: Any = None
        if has_way_back and layout.pp > 1 and (layout.is_first_stage or layout.is_last_stage):
            self._back = meet(f"back-{tp_rank}", 0 if layout.is_last_stage else 1, 2)
        if store is not None:
            store.set_timeout(timedelta(seconds=timeout_s))

    @classmethod
    def alone(cls, device: torch.device | str) -> "Group":
        """Return the ties of a rank that is the only one: none."""
        return cls(None, Layout(tp=1, pp=1, rank=0), device, timeout_s=0)

    def least(self, name: str, value: int) -> int:
        """Return the least of all ranks' values; each gives its own, once for a name. The host waits for the others.

        Raises:
            RuntimeError: If they do not come in time.
        """
        if self._store is None:
            return value
        self._store.set(f"{name}-{self.layout.rank}", str(value))
        return min(int(self._store.get(f"{name}-{rank}")) for rank in range(self.layout.num_ranks))

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the stage's tensors, the same on each of its ranks. Written in place."""
        return tensor if self._stage is None else self._stage.reduce(tensor)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the stage's first rank. Written in place on the others."""
        return tensor if self._stage is None else self._stage.broadcast(tensor)

    def gather(self, part: Tensor, total: int) -> Tensor | None:
        """Return the stage's tensors side by side, (rows, total), on its first rank; None on the others.

        Args:
            part: (rows, columns), this rank's share of total (see Layout.columns).
            total: Columns of all ranks together.
        """
        return part if self._stage is None else self._stage.gather(part, total)

    def send(self, tensor: Tensor) -> None:
        """Hand a tensor over to the next stage. It must not change any more. Returns at once unless MAX_UNSENT are
        under way."""
        assert self._after is not None, "the last stage has none after it"
        self._hand_over("after", self._after, 1, tensor)

    def receive(self, into: Tensor) -> None:
        """Take what the stage before hands over, of that shape and dtype."""
        assert self._before is not None, "the first stage has none before it"
        self._before.recv([into], 0, 0).wait()

    def send_back(self, tensor: Tensor) -> None:
        """Hand a tensor of the last stage over to the first. Otherwise as send."""
        assert self._back is not None, "the last of several stages sends back"
        self._hand_over("back", self._back, 1, tensor)

    def receive_back(self, into: Tensor) -> Callable[[], None]:
        """Ask for what the last stage will send back; return what waits for it. Asked for in the order of sending."""
        assert self._back is not None, "the first of several stages is sent something back"
        work = self._back.recv([into], 0, 0)

        def wait() -> None:
            work.wait()

        return wait

    def _hand_over(self, hop: str, backend: Any, peer: int, tensor: Tensor) -> None:
        sends = self._sends.setdefault(hop, [])
        while len(sends) >= MAX_UNSENT:
            sends.pop(0)[0].wait()
        sends.append((backend.send([tensor], peer, 0), tensor))
