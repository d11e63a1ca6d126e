"""The device runner on the CPU, and the smallest scheduler that can drive it one iteration ahead."""

import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.ids import RequestId, Slot
from common.messages.requests import Sampling
from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.paged import PagedBatch, TorchPagedAttention
from gpu_worker.cuda.device import HostDevice
from gpu_worker.cuda.operations import Operations, TorchOperations
from gpu_worker.cuda.results import Computed, Launched
from gpu_worker.cuda.runner import CudaRunner
from gpu_worker.kv_cache import KvCache
from gpu_worker.loading import LoadedModel
from gpu_worker.parallel.group import Group
from gpu_worker.slots import Limits, Resident, Row

GREEDY = Sampling(temperature=0.0)
WAITS = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten._unique2,
    torch.ops.aten.equal,
    # In inference mode what is made of others comes as it is.
    torch.ops.aten.item,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.argwhere,
    torch.ops.aten.allclose,
    torch.ops.aten.bincount,
)
"""What makes the host wait for a device: `.item()`, `bool(tensor)`, and their kin."""
WAITING_OVERLOADS = (
    torch.ops.aten.where.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten.repeat_interleave.self_Tensor,
)
"""Where the same operation with other arguments does not."""
INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
"""By a mask they do, too: it is turned into places, whose number the host must know."""


class NoWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own.
    """Raises where an operation would make the host wait for a value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_indexing = func.overloadpacket in INDEXING
        is_waiting = func.overloadpacket in WAITS or func in WAITING_OVERLOADS
        if is_waiting or (is_indexing and any(_is_mask(index) for index in args[1])):
            raise AssertionError(f"{func} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


class WatchedDevice(HostDevice):
    """The host as a device; remembers its host buffers, and how many rows each captured graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.host_buffers: list[Tensor] = []
        self.captured: list[int] = []
        self.on_replay: Callable[[int], None] = lambda num_rows: None

    def host_buffer(self, num_elements: int) -> Tensor:
        self.host_buffers.append(super().host_buffer(num_elements))
        return self.host_buffers[-1]

    def capture(self, run: Callable[[], Tensor], buffers: Callable[[], Sequence[Tensor]]) -> Any:
        num_rows = len(run())

        def watched() -> Tensor:
            if num_rows in self.captured:
                self.on_replay(num_rows)
            return run()

        with NoWaits():
            graph = super().capture(watched, buffers)
        self.captured.append(num_rows)
        return graph


class DeviceWorld:
    """One model, one KV pool; a request's blocks are given whole when it is added, in a shuffled order."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        has_graphs: bool = True,
        block_size: int = 4,
        num_blocks: int = 128,
        max_num_slots: int = 12,
        seed: int = 0,
        device: WatchedDevice | None = None,
        backend: AttentionBackend[PagedBatch] | None = None,
        operations: Operations | None = None,
        group: Group | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """backend and operations: other than the plain ones. Of a rank in a group, model is its shard, and vocab_size
        the whole model's."""
        config = model.config
        self.limits = Limits(
            vocab_size=vocab_size or config.vocab_size,
            max_model_len=model.max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_slots=max_num_slots,
            max_chunk_tokens=512,
        )
        self.device = device or WatchedDevice()
        kv_cache = KvCache.allocate(
            num_layers=config.num_layers,
            num_blocks=num_blocks + 1,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=model.weights.embedding.dtype,
        )
        backend, operations = backend or TorchPagedAttention(), operations or TorchOperations()
        self.runner = CudaRunner(self.device, model, kv_cache, backend, operations, self.limits, group)
        self.runner.warm_up(has_graphs=has_graphs)
        self.free_blocks = list(range(num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.residents: dict[str, Resident] = {}
        self._free_slots = list(range(max_num_slots))

    def add(
        self,
        name: str,
        token_ids: Sequence[int],
        *,
        room: int,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        num_scored: int = 0,
    ) -> None:
        """Introduce a request, with blocks for its tokens and room more."""
        num_blocks = -(-(len(token_ids) + room) // self.limits.block_size)
        blocks, self.free_blocks = self.free_blocks[:num_blocks], self.free_blocks[num_blocks:]
        assert len(blocks) == num_blocks, "the test's pool is too small"
        self.residents[name] = Resident(
            slot=Slot(self._free_slots.pop(0)),
            request_id=RequestId(name),
            num_prompt_tokens=len(token_ids),
            seed=seed,
            sampling=sampling,
            token_ids=array("i", token_ids),
            block_table=array("i", blocks),
            num_tokens=len(token_ids),
            num_computed=0,
            num_scored=num_scored,
        )

    def remove(self, name: str) -> None:
        """Give a request's slot and blocks back."""
        resident = self.residents.pop(name)
        self._free_slots.insert(0, resident.slot)
        self.free_blocks = [*resident.block_table, *self.free_blocks]

    def rows(self, num_tokens: Mapping[str, int]) -> list[Row]:
        """Count so many more tokens of each request as computed; a row that ends at the last known one is sampled."""
        rows = []
        for name, count in num_tokens.items():
            resident = self.residents[name]
            assert resident.num_computed is not None
            start, end = resident.num_computed, resident.num_computed + count
            is_sampled = end == resident.num_tokens
            rows.append(Row(resident, start, count, is_sampled))
            resident.num_computed = end
            resident.num_tokens += is_sampled
        return rows

    def launch(self, num_tokens: Mapping[str, int]) -> tuple[list[str], Launched]:
        """Launch an iteration, without a look at the device; return the names of sampled requests, and what is due."""
        rows = self.rows(num_tokens)
        with NoWaits():
            launched = self.runner.launch(rows)
        return [name for name, row in zip(num_tokens, rows, strict=True) if row.is_sampled], launched

    def computed(self, num_tokens: Mapping[str, int]) -> Computed:
        """Launch an iteration and wait for it; return all that came of it."""
        return self.launch(num_tokens)[1].wait()

    def iterate(self, num_tokens: Mapping[str, int]) -> dict[str, int]:
        """Launch an iteration and wait for it."""
        names, launched = self.launch(num_tokens)
        return dict(zip(names, launched.wait().token_ids, strict=True))

    def prefill(self, name: str, chunk_len: int) -> int:
        """Compute a request's known tokens in chunks; return what was sampled after the last."""
        resident = self.residents[name]
        while (left := resident.num_tokens - (resident.num_computed or 0)) > chunk_len:
            assert self.iterate({name: chunk_len}) == {}
        return self.iterate({name: left})[name]

    def decode(self, names: Iterable[str], num_tokens: int, *, ahead: bool = False) -> dict[str, list[int]]:
        """Return the next num_tokens of each request."""
        return self.run([dict.fromkeys(names, 1)] * num_tokens, ahead=ahead)

    def run(self, iterations: Sequence[Mapping[str, int]], *, ahead: bool) -> dict[str, list[int]]:
        """Return what each request sampled; with ahead an iteration is launched before the last one is waited for."""
        output: dict[str, list[int]] = {}
        due: list[tuple[list[str], Launched]] = []
        for batch in (*iterations, None):
            if batch is not None:
                due.append(self.launch(batch))
            while len(due) > (ahead and batch is not None):
                names, launched = due.pop(0)
                for name, token in zip(names, launched.wait().token_ids, strict=True):
                    output.setdefault(name, []).append(token)
        return output
