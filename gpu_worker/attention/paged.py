"""What device kernels read of a hybrid batch, and the plain torch version of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionSpec, BatchLayout, Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Rows of a hybrid batch on the device, decodes first.

    What varies from one decode batch to the next lies in tensors alone, so that a CUDA graph can be replayed on them.
    """

    query_starts: Tensor  # (rows + 1,) int32; row r has tokens [query_starts[r], query_starts[r + 1])
    kv_lens: Tensor  # (rows,) int32, with the tokens being computed
    block_tables: Tensor  # (rows, width) int32; entries past a row's own length are not read
    num_decodes: int  # the first rows, with one query each
    max_query_len: int  # of the other rows; 0 without any
    max_kv_len: int  # no row is longer; a bound, not the greatest
    window: int | None = None  # as AttentionSpec's
    scale: float | None = None


def paged_batch(layout: BatchLayout, spec: AttentionSpec) -> PagedBatch:
    """Lay a batch out for device kernels. The leading rows of one query count as decodes."""
    device = spec.device
    num_decodes = 0
    while num_decodes < len(layout.query_lens) and layout.query_lens[num_decodes] == 1:
        num_decodes += 1
    starts = torch.tensor([0, *layout.query_lens], dtype=torch.int64).cumsum(0)
    return PagedBatch(
        query_starts=starts.to(device=device, dtype=torch.int32),
        kv_lens=torch.tensor(layout.kv_lens, dtype=torch.int32).to(device),
        block_tables=layout.block_tables.to(device=device, dtype=torch.int32).contiguous(),
        num_decodes=num_decodes,
        max_query_len=max(layout.query_lens[num_decodes:], default=0),
        max_kv_len=max(layout.kv_lens),
        window=spec.window,
        scale=spec.scale,
    )


def capability_of(device: str) -> tuple[int, int]:
    """Return a CUDA device's compute capability; (0, 0) where torch sees none."""
    if not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(torch.device(device))


class TorchPagedAttention:
    """Attention by gathering every key that a table could name: slow, on any device, and without a look at any value.

    It stands in for the device kernels where there is no GPU, under the same runner.
    """

    name = "torch"
    is_batch_invariant = False
    block_size_rule = "any"

    def probe(self, spec: AttentionSpec) -> Probe:
        return Probe(True, f"torch {torch.__version__}")

    def prepare(self, layout: BatchLayout, spec: AttentionSpec) -> PagedBatch:
        return paged_batch(layout, spec)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: PagedBatch) -> Tensor:
        num_tokens, num_heads, head_dim = queries.shape
        group = num_heads // keys.shape[2]
        tokens = torch.arange(num_tokens, device=queries.device, dtype=torch.int32)
        row = torch.searchsorted(prepared.query_starts, tokens, right=True) - 1  # (tokens,)
        # Positions of the queries: the last of a row sees all of the row's keys.
        position = (prepared.kv_lens[row] - prepared.query_starts[row + 1] + tokens).unsqueeze(1)
        tables = prepared.block_tables[row].long()  # (tokens, width)
        places = torch.arange(tables.shape[1] * keys.shape[1], device=queries.device).unsqueeze(0)
        is_seen = places <= position  # (tokens, width * block_size)
        if prepared.window is not None:
            is_seen &= places > position - prepared.window
        is_seen = is_seen.view(num_tokens, 1, 1, -1)
        grouped = queries.float().view(num_tokens, -1, group, head_dim)  # (tokens, kv_heads, group, head_dim)
        row_keys = keys[tables].flatten(1, 2).float()  # (tokens, width * block_size, kv_heads, head_dim)
        row_values = values[tables].flatten(1, 2).float()
        scale = head_dim**-0.5 if prepared.scale is None else prepared.scale
        scores = torch.einsum("thgd,tkhd->thgk", grouped, row_keys) * scale
        weights = scores.masked_fill(~is_seen, float("-inf")).softmax(dim=-1)
        # What nobody wrote may be anything, and nothing times NaN is NaN.
        row_values = row_values.masked_fill(~is_seen.view(num_tokens, -1, 1, 1), 0.0)
        attended = torch.einsum("thgk,tkhd->thgd", weights, row_values)
        return attended.reshape(num_tokens, num_heads, head_dim).to(queries.dtype)
