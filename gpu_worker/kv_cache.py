"""The paged KV cache: one pool of blocks per layer, and where in it a token's key and value lie."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.memory import huge_zeros


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of every layer. Which block belongs to whom is the scheduler's business alone."""

    keys: tuple[Tensor, ...]  # by layer: (num_blocks, block_size, kv_heads, head_dim)
    values: tuple[Tensor, ...]  # the same shape

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> "KvCache":
        """Return a pool full of zeros: kernels load the unused tail of a block, and 0 times NaN would be NaN."""
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return cls(
            keys=tuple(_zeros(shape, dtype, device) for _ in range(num_layers)),
            values=tuple(_zeros(shape, dtype, device) for _ in range(num_layers)),
        )

    @classmethod
    def allocate_by_head(
        cls, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> "KvCache":
        """Return a pool of the same shape that lies in memory as our own kernels read it.

        A block is whole for one head, and its keys are transposed: the same dimension of neighbouring tokens side by
        side, so that one vector of keys yields as many scores.
        """
        keys = (num_blocks, num_kv_heads, head_dim, block_size)
        values = (num_blocks, num_kv_heads, block_size, head_dim)
        return cls(
            keys=tuple(_zeros(keys, dtype).permute(0, 3, 1, 2) for _ in range(num_layers)),
            values=tuple(_zeros(values, dtype).permute(0, 2, 1, 3) for _ in range(num_layers)),
        )

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0]

    @property
    def block_size(self) -> int:
        return self.keys[0].shape[1]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one layer's keys and values, both (tokens, kv_heads, head_dim), at slots, (tokens,) int64."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Taken as they are first used. torch.zeros writes each of them: 2 s for 1.5 GB.
    return huge_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return what one token takes of the pool, keys and values of all layers together."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


def slots_of(block_table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Translate token positions into slots of the flat KV cache.

    Args:
        block_table: (num_blocks,) int64; entry i holds [i * block_size, (i + 1) * block_size).
        positions: (num_tokens,) int64, each below num_blocks * block_size.
        block_size: Tokens per KV block.

    Returns:
        (num_tokens,) int64.

    Source: block layout of PagedAttention (Kwon et al., SOSP 2023).
    """
    return block_table[positions // block_size] * block_size + positions % block_size
