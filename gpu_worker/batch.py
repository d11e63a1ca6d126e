"""Rows laid one after another, as the model and its kernels read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.attention.base import BatchLayout
from gpu_worker.kv_cache import slots_of
from gpu_worker.slots import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """Rows laid one after another, as the model reads them."""

    token_ids: Tensor  # (tokens,) int64
    positions: Tensor  # (tokens,) int64
    slots: Tensor  # (tokens,) int64, where each token's KV goes
    sampled: Tensor  # (samples,) int64, indices into the batch: of each row the tokens with logits, in order
    layout: BatchLayout


def passes(rows: Sequence[Row], max_logits: int) -> Iterator[Sequence[Row]]:
    """Yield the rows in as many passes through the model as it takes for none to have more logits than max_logits.

    Nearly always that is one. A prompt that is scored needs logits for all of its tokens, 200 kB each, so its row is
    cut like a prompt into chunks: its parts come one after another, each with the one before it in the cache.
    """
    if sum([row.num_logits for row in rows]) <= max_logits:
        yield rows
        return
    together: list[Row] = []
    room = max_logits
    for whole in rows:
        rest = whole
        while rest.num_logits > room:
            if room:
                # Up to the token before the first scored one there are no logits; from there on each token has some.
                num_tokens = rest.scored.start - 1 - rest.start + min(room, len(rest.scored))
                together.append(Row(rest.resident, rest.start, num_tokens, is_sampled=False))
                rest = Row(rest.resident, rest.start + num_tokens, rest.num_tokens - num_tokens, rest.is_sampled)
            yield together
            together, room = [], max_logits
        together.append(rest)
        room -= rest.num_logits
    yield together


def flatten(rows: Sequence[Row], block_size: int) -> FlatBatch:
    """Lay at least one row out as a flat batch."""
    ends = [row.start + row.num_tokens for row in rows]
    tables = _padded_tables(rows, [-(-end // block_size) for end in ends])
    token_ids, positions = _tokens_of(rows)
    row_of_token = np.repeat(np.arange(len(rows)), [row.num_tokens for row in rows])
    # Each token looks its block up in its own row of the padded tables, seen as one long table.
    in_tables = torch.from_numpy(row_of_token * (tables.shape[1] * block_size) + positions)
    return FlatBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slots=slots_of(tables.flatten(), in_tables, block_size),
        sampled=torch.from_numpy(_places_of_logits(rows)),
        layout=BatchLayout(query_lens=tuple(row.num_tokens for row in rows), kv_lens=tuple(ends), block_tables=tables),
    )


def _tokens_of(rows: Sequence[Row]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows' token ids and positions, both (tokens,) int64."""
    token_ids: list[int] = []
    positions: list[int] = []
    for row in rows:
        end = row.start + row.num_tokens
        token_ids.extend(row.resident.token_ids[row.start : end])
        positions.extend(range(row.start, end))
    return np.array(token_ids, dtype=np.int64), np.array(positions, dtype=np.int64)


def _places_of_logits(rows: Sequence[Row]) -> NDArray[np.int64]:
    """Return where in the flat batch logits are needed, (samples,) int64: before each scored token, and at the end of
    each row that is sampled."""
    places: list[int] = []
    row_start = 0
    for row in rows:
        places.extend(row_start + token - 1 - row.start for token in row.scored)
        row_start += row.num_tokens
        if row.is_sampled:
            places.append(row_start - 1)
    return np.array(places, dtype=np.int64)


def _padded_tables(rows: Sequence[Row], nums_blocks: Sequence[int]) -> Tensor:
    """Return block tables, (rows, longest) int64, each as long as its row needs, then its own last block again."""
    tables = np.empty((len(rows), max(nums_blocks)), dtype=np.int64)
    for index, (row, num_blocks) in enumerate(zip(rows, nums_blocks, strict=True)):
        tables[index, :num_blocks] = row.resident.block_table[:num_blocks]
        tables[index, num_blocks:] = row.resident.block_table[num_blocks - 1]
    return torch.from_numpy(tables)
