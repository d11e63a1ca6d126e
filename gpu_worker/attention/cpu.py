"""A first attention back end for CPUs: torch's fused kernel, and as few copies of the KV cache as it allows.

Rows fall into three kinds. Chunks run one by one. Decodes of similar length run together, over keys gathered into
one padded tensor. A decode whose blocks happen to lie one after another needs no gathering, and a long one then runs
alone on the pool itself: 8 decodes of 2,000 tokens (3 kv heads, float32, two cores) take 1.7 ms a layer that way,
against 5.1 ms gathered; at 100 tokens the single calls cost more than the copies, 1.2 ms against 0.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.attention.base import AttentionSpec, BatchLayout, Probe

LEAST_DIRECT_LEN = 768
"""KV length from which a decode on contiguous blocks is better off alone, if there are others (see above)."""
MAX_PADDING_RATIO = 2
"""Decodes that run together differ in length by at most this factor, so padding never doubles the copying."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One request by itself."""

    start: int  # its first query in the flat batch
    query_len: int
    blocks: Tensor | None  # (num_blocks,) int64 to gather, or
    first_block: int  # where its contiguous blocks begin
    num_blocks: int
    tokens: slice  # of those in its blocks: what some query sees
    mask: Tensor | None  # (query_len, tokens), 0 or -inf; absent where every query sees every key


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decodes that run as one padded batch."""

    queries: Tensor  # (size,) int64, their places in the flat batch
    blocks: Tensor  # (size * num_blocks,) int64
    mask: Tensor  # (size, 1, 1, num_blocks * block_size), 0 or -inf


@dataclass(frozen=True, slots=True)
class _Decode:
    """A decode that is to join a group. Sorted by length first, then by place, so that a batch has one order."""

    num_tokens: int  # in its blocks, up to its own
    place: int  # in the flat batch
    row: int
    first_block: int  # in its table
    first_token: int  # in that block: what comes before is out of the window


@dataclass(frozen=True, slots=True)
class CpuBatch:
    """One iteration's rows by kind, shared by all layers with the same window."""

    rows: tuple[_Row, ...]
    groups: tuple[_DecodeGroup, ...]
    scale: float | None


class CpuAttention:
    """torch.nn.functional.scaled_dot_product_attention over gathered blocks."""

    name = "cpu"
    is_batch_invariant = False  # Which decodes run together, and how far they are padded, depends on the neighbours.
    block_size_rule = "any"

    def probe(self, spec: AttentionSpec) -> Probe:
        if spec.device != "cpu":
            return Probe(False, f"it runs on the CPU, not on {spec.device}")
        return Probe(True, f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")

    def prepare(self, layout: BatchLayout, spec: AttentionSpec) -> CpuBatch:
        rows: list[_Row] = []
        together: list[_Decode] = []
        has_one_decode = layout.query_lens.count(1) == 1
        start = 0
        for index, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
            # Blocks that lie wholly before the first query's window are not looked at.
            first_key = 0 if spec.window is None else max(0, kv_len - query_len - spec.window + 1)
            skipped_blocks, first_token = divmod(first_key, spec.block_size)
            num_tokens = kv_len - skipped_blocks * spec.block_size
            blocks = layout.block_tables[index, skipped_blocks : -(-kv_len // spec.block_size)]
            first_block = (
                _start_of_run(blocks) if query_len > 1 or has_one_decode or num_tokens >= LEAST_DIRECT_LEN else None
            )
            if query_len > 1 or first_block is not None:
                rows.append(
                    _Row(
                        start=start,
                        query_len=query_len,
                        blocks=None if first_block is not None else blocks,
                        first_block=first_block or 0,
                        num_blocks=len(blocks),
                        tokens=slice(first_token, num_tokens),
                        mask=_causal_mask(query_len, kv_len - first_key, spec) if query_len > 1 else None,
                    )
                )
            else:
                together.append(_Decode(num_tokens, start, index, skipped_blocks, first_token))
            start += query_len
        return CpuBatch(tuple(rows), tuple(_group(together, layout.block_tables, spec)), spec.scale)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: CpuBatch) -> Tensor:
        attended = torch.empty_like(queries)
        for group in prepared.groups:
            attended[group.queries] = _attend_group(queries[group.queries], keys, values, group, prepared.scale)
        for row in prepared.rows:
            end = row.start + row.query_len
            attended[row.start : end] = _attend_row(queries[row.start : end], keys, values, row, prepared.scale)
        return attended


def _attend_group(queries: Tensor, keys: Tensor, values: Tensor, group: _DecodeGroup, scale: float | None) -> Tensor:
    size, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[2]
    # The query heads of a kv head stand in for query positions, so that GQA copies no key: (size, kv_heads, group, dim)
    grouped = queries.reshape(size, num_kv_heads, -1, head_dim)
    padded = (size, -1, num_kv_heads, head_dim)
    group_keys = keys.index_select(0, group.blocks).view(padded).transpose(1, 2)  # (size, kv_heads, padded_len, dim)
    group_values = values.index_select(0, group.blocks).view(padded).transpose(1, 2)
    attended = functional.scaled_dot_product_attention(
        grouped, group_keys, group_values, attn_mask=group.mask, scale=scale
    )
    return attended.reshape(size, num_heads, head_dim)


def _attend_row(queries: Tensor, keys: Tensor, values: Tensor, row: _Row, scale: float | None) -> Tensor:
    query_len, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[2]
    row_keys = _tokens_of(row, keys).transpose(0, 1).unsqueeze(0)  # (1, kv_heads, tokens, head_dim)
    row_values = _tokens_of(row, values).transpose(0, 1).unsqueeze(0)
    if query_len == 1:
        grouped = queries.reshape(1, num_kv_heads, -1, head_dim)  # as in a group
        attended = functional.scaled_dot_product_attention(grouped, row_keys, row_values, scale=scale)
        return attended.reshape(1, num_heads, head_dim)
    by_head = queries.transpose(0, 1).unsqueeze(0)  # (1, heads, query_len, head_dim)
    attended = functional.scaled_dot_product_attention(
        by_head, row_keys, row_values, attn_mask=row.mask, enable_gqa=True, scale=scale
    )
    return attended.squeeze(0).transpose(0, 1)


def _tokens_of(row: _Row, pool: Tensor) -> Tensor:
    """Return a request's keys or values in position order, as far as it sees them: (tokens, kv_heads, head_dim)."""
    if row.blocks is not None:
        return pool.index_select(0, row.blocks).flatten(0, 1)[row.tokens]
    return pool[row.first_block : row.first_block + row.num_blocks].flatten(0, 1)[row.tokens]


def _start_of_run(blocks: Tensor) -> int | None:
    """Return the first block if the others follow it one by one, else None."""
    first = int(blocks[0])
    is_run = int(blocks[-1]) - first == len(blocks) - 1 and bool((blocks.diff() == 1).all())
    return first if is_run else None


def _causal_mask(query_len: int, num_keys: int, spec: AttentionSpec) -> Tensor:
    """Return 0 where a query may see a key, else -inf: (query_len, num_keys). The last query is at the last key."""
    query_positions = torch.arange(num_keys - query_len, num_keys).unsqueeze(1)
    key_positions = torch.arange(num_keys).unsqueeze(0)
    is_hidden = key_positions > query_positions
    if spec.window is not None:
        is_hidden |= key_positions <= query_positions - spec.window
    return torch.zeros(query_len, num_keys, dtype=spec.dtype).masked_fill_(is_hidden, float("-inf"))


def _group(decodes: Sequence[_Decode], block_tables: Tensor, spec: AttentionSpec) -> "list[_DecodeGroup]":
    """Return the decodes in groups of similar KV length."""
    groups: list[list[_Decode]] = []
    for decode in sorted(decodes, key=lambda decode: (decode.num_tokens, decode.place)):
        if groups and decode.num_tokens <= MAX_PADDING_RATIO * max(groups[-1][0].num_tokens, spec.block_size):
            groups[-1].append(decode)
        else:
            groups.append([decode])
    return [_pad(group, block_tables, spec) for group in groups]


def _pad(group: Sequence[_Decode], block_tables: Tensor, spec: AttentionSpec) -> _DecodeGroup:
    num_blocks = -(-group[-1].num_tokens // spec.block_size)  # of the longest, which is the last
    rows = torch.tensor([decode.row for decode in group]).unsqueeze(1)
    columns = torch.tensor([decode.first_block for decode in group]).unsqueeze(1) + torch.arange(num_blocks)
    num_tokens = torch.tensor([decode.num_tokens for decode in group]).unsqueeze(1)
    first_tokens = torch.tensor([decode.first_token for decode in group]).unsqueeze(1)
    places = torch.arange(num_blocks * spec.block_size).unsqueeze(0)
    mask = torch.zeros(len(group), num_blocks * spec.block_size, dtype=spec.dtype)
    mask.masked_fill_((places >= num_tokens) | (places < first_tokens), float("-inf"))
    return _DecodeGroup(
        queries=torch.tensor([decode.place for decode in group]),
        # Tables repeat their own last block past their end, so padding never reads a block of someone else.
        blocks=block_tables[rows, columns.clamp_(max=block_tables.shape[1] - 1)].flatten(),
        mask=mask.view(len(group), 1, 1, -1),
    )
