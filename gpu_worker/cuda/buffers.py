"""What stays on the device: each slot's tokens, block table and sampling, and the rows of the iteration in hand.

All of it is allocated once. A slot's tokens live here and nowhere else: a decode reads its input where the last
iteration's sample was written, so it can be enqueued before the host has seen that sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.cuda.device import Device
from gpu_worker.slots import Limits, Resident, Row

NUM_SECTIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """The rows of one iteration, on the device; each (max_num_slots + 1,) int32, of which the first ones count."""

    slots: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    sampled: Tensor  # by sampled row: the row's place among the rows

    @classmethod
    def of(cls, packed: Tensor) -> "RowTensors":
        """Give the sections of one buffer their names."""
        slots, query_starts, kv_lens, sampled = packed.view(NUM_SECTIONS, -1)
        return cls(slots=slots, query_starts=query_starts, kv_lens=kv_lens, sampled=sampled)


class SlotState:
    """One row for each slot, and one more for the rows that fill up a graph's batch."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self._device = device
        self._limits = limits
        self.trash_slot = limits.max_num_slots
        num_rows = limits.max_num_slots + 1
        self.table_width = -(-limits.max_model_len // limits.block_size)
        place = device.torch_device
        # One place more than positions: the token after the last position is sampled, too.
        self.tokens = torch.zeros(num_rows, limits.max_model_len + 1, dtype=torch.int32, device=place)
        self.tables = torch.zeros(num_rows, self.table_width, dtype=torch.int32, device=place)
        # The pool has one block that no plan can name; what fills up a batch writes there.
        self.tables[self.trash_slot] = limits.num_blocks
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=place)
        self.temperatures = torch.ones(num_rows, dtype=torch.float32, device=place)
        self.top_ks = torch.zeros(num_rows, dtype=torch.int64, device=place)
        self.top_ps = torch.ones(num_rows, dtype=torch.float32, device=place)
        self.min_ps = torch.zeros(num_rows, dtype=torch.float32, device=place)
        self._residents: dict[int, Resident] = {}
        self._table_lens: dict[int, int] = {}

    def update(self, rows: Sequence[Row]) -> None:
        """Bring the slots of these rows up to date: requests that are new in theirs, and tables that have grown."""
        new = [row.resident for row in rows if not self.holds(row.resident)]
        for resident in new:
            self._introduce(resident)
        places: list[int] = []
        blocks: list[int] = []
        for row in rows:
            slot, table = row.resident.slot, row.resident.block_table
            known = self._table_lens[slot]
            if known < len(table):
                places.extend(range(slot * self.table_width + known, slot * self.table_width + len(table)))
                blocks.extend(table[known:])
                self._table_lens[slot] = len(table)
        if blocks:
            uploaded = self._device.upload(torch.tensor([places, blocks], dtype=torch.int64))
            self.tables.view(-1).index_copy_(0, uploaded[0], uploaded[1].int())

    def holds(self, resident: Resident) -> bool:
        """Return whether a request is the one that its slot was last brought up to date for."""
        return self._residents.get(resident.slot) is resident

    def buffers(self) -> tuple[Tensor, ...]:
        """Return what graphs read and write."""
        return self.tokens, self.tables

    def _introduce(self, resident: Resident) -> None:
        slot, sampling = resident.slot, resident.sampling
        self._residents[slot] = resident
        self._table_lens[slot] = 0
        # A prefix that is in the cache already is never computed here, but what follows may ask for all tokens.
        known = torch.frombuffer(resident.token_ids, dtype=torch.int32).clone()
        self.tokens[slot, : len(known)].copy_(self._device.upload(known), non_blocking=True)
        # One small upload for all floats; the seed's 64 bits and top_k go apart.
        integers = self._device.upload(torch.tensor([resident.seed, sampling.top_k], dtype=torch.int64))
        floats = self._device.upload(
            torch.tensor([sampling.temperature, sampling.top_p, sampling.min_p], dtype=torch.float32)
        )
        self.seeds[slot].copy_(integers[0])
        self.top_ks[slot].copy_(integers[1])
        self.temperatures[slot].copy_(floats[0])
        self.top_ps[slot].copy_(floats[1])
        self.min_ps[slot].copy_(floats[2])
