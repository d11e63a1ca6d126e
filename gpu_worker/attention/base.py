"""What an attention back end is: one call per layer over one flat hybrid batch, prepared once per iteration."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from gpu_worker.kernels.library import Kernels
from gpu_worker.models.config import ModelConfig

Prepared = TypeVar("Prepared")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a back end would have to work with."""

    device: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kernels: Kernels | None = None  # our own, where they are built
    window: int | None = None  # a query sees so many keys at most, its own token's included; None: all before it
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    unlike_llama: str = ""  # what the model does that kernels for Llama's layers cannot

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        device: str,
        dtype: torch.dtype,
        block_size: int,
        kernels: Kernels | None = None,
        unlike_llama: str = "",
    ) -> "AttentionSpec":
        """Return what a model of this shape asks of a back end."""
        return cls(
            device=device,
            dtype=dtype,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            kernels=kernels,
            scale=config.attention_scale,
            unlike_llama=unlike_llama,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Where the rows of a flat batch lie. Row i computes its last query_lens[i] of kv_lens[i] tokens.

    The KV of the tokens being computed is in the cache before attention is called, so kv_lens counts them, and query
    j of row i sees the keys up to position kv_lens[i] - query_lens[i] + j, or with a window the last of those.
    """

    query_lens: tuple[int, ...]  # each at least 1; the flat batch is the rows one after another
    kv_lens: tuple[int, ...]
    block_tables: Tensor  # (rows, longest) int64; past its own end a row repeats its last block


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a back end can serve a spec here; if not, why, and what would help."""

    is_available: bool
    detail: str


class AttentionBackend(Protocol[Prepared]):
    """Kernels that share one signature. Implementations hold no state between iterations."""

    name: str
    is_batch_invariant: bool
    """Whether a row's result depends on neither its neighbours nor how its tokens are chunked, to the bit."""
    block_size_rule: str
    """Which block sizes it takes, for people; probe enforces it."""

    def probe(self, spec: AttentionSpec) -> Probe:
        """Return whether this back end can serve spec on this machine. Cheap; loads nothing large."""

    def prepare(self, layout: BatchLayout, spec: AttentionSpec) -> Prepared:
        """Do what all layers of an iteration share."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: Prepared) -> Tensor:
        """Return each query's attention, (tokens, heads, head_dim), for one layer.

        Args:
            queries: (tokens, heads, head_dim), rotated.
            keys: (num_blocks, block_size, kv_heads, head_dim), the layer's pool; head h reads kv head
                h // (heads / kv_heads).
            values: As keys.
            prepared: What prepare returned for this batch.
        """


@dataclass(frozen=True, slots=True)
class BoundAttention(Generic[Prepared]):
    """A back end with the batch that it was prepared for: what a model's forward pass calls."""

    backend: AttentionBackend[Prepared]
    prepared: Prepared

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.backend.attend(queries, keys, values, self.prepared)


def bind(backend: AttentionBackend[Prepared], layout: BatchLayout, spec: AttentionSpec) -> BoundAttention[Prepared]:
    """Prepare backend for one iteration."""
    return BoundAttention(backend, backend.prepare(layout, spec))
