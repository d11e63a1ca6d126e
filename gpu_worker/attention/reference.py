"""The plain attention that every other back end is tested against: row by row, float32, an explicit mask."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionSpec, BatchLayout, Probe


@dataclass(frozen=True, slots=True)
class ReferenceBatch:
    """One iteration's rows, and what a query sees of them."""

    layout: BatchLayout
    window: int | None
    scale: float


class ReferenceAttention:
    """Slow and obviously right. Works on any device, dtype, block size and window."""

    name = "reference"
    is_batch_invariant = False  # Keys that a later chunk will mask are not summed yet: another length, another order.
    block_size_rule = "any"

    def probe(self, spec: AttentionSpec) -> Probe:
        return Probe(True, f"torch {torch.__version__}")

    def prepare(self, layout: BatchLayout, spec: AttentionSpec) -> ReferenceBatch:
        return ReferenceBatch(layout, spec.window, spec.head_dim**-0.5 if spec.scale is None else spec.scale)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: ReferenceBatch) -> Tensor:
        rows = []
        start = 0
        layout = prepared.layout
        for index, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
            table = layout.block_tables[index]
            # Blocks in position order, flattened, are the request's tokens in position order: (kv_len, kv_heads, dim)
            row_keys = keys[table].flatten(0, 1)[:kv_len]
            row_values = values[table].flatten(0, 1)[:kv_len]
            rows.append(_attend_row(queries[start : start + query_len], row_keys, row_values, prepared))
            start += query_len
        return torch.cat(rows).to(queries.dtype)


def _attend_row(queries: Tensor, keys: Tensor, values: Tensor, prepared: ReferenceBatch) -> Tensor:
    """Return softmax(q k * scale) v for one request: (query_len, heads, head_dim) float32."""
    query_len, num_heads, _ = queries.shape
    kv_len, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    every_key = keys.float().repeat_interleave(group, dim=1)  # (kv_len, heads, head_dim)
    every_value = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", queries.float(), every_key) * prepared.scale  # (heads, query_len, kv_len)
    query_positions = torch.arange(kv_len - query_len, kv_len, device=queries.device).unsqueeze(1)
    key_positions = torch.arange(kv_len, device=queries.device).unsqueeze(0)
    is_hidden = key_positions > query_positions  # (query_len, kv_len)
    if prepared.window is not None:
        is_hidden |= key_positions <= query_positions - prepared.window
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, every_value)
