"""Log-probabilities on the device: records that the host reads with an iteration's tokens (see results)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.slots import Row


def write_records(records: Tensor, logprobs: Tensor, token_ids: Tensor) -> None:
    """Score one token a row, beside the likeliest in its place. Never waits.

    Args:
        records: (rows, 1 + 2 * num_top) int32, written.
        logprobs: (rows, vocab) float32, of gpu_worker.logprobs.log_probabilities.
        token_ids: (rows,) of any integer dtype.
    """
    num_top = records.shape[1] // 2
    records[:, :1] = logprobs.gather(1, token_ids.long().unsqueeze(1)).view(torch.int32)
    if num_top:
        values, indices = logprobs.topk(num_top, dim=1)  # (rows, num_top), descending
        records[:, 1 : 1 + num_top] = indices
        records[:, 1 + num_top :] = values.view(torch.int32)


def scored_places(rows: Sequence[Row]) -> Tensor:
    """Return where in the flat batch each scored prompt token's logits are, then its slot, then its position: (3,
    tokens) int64 on the host."""
    places: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    row_start = 0
    for row in rows:
        scored = row.scored
        first = row_start + scored.start - 1 - row.start  # Of the token before it.
        places.extend(range(first, first + len(scored)))
        slots.extend([row.resident.slot] * len(scored))
        positions.extend(scored)
        row_start += row.num_tokens
    return torch.tensor([places, slots, positions], dtype=torch.int64)
