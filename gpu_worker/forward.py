"""The two ways through a model: torch, layer by layer, or our own kernels, in one call."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionBackend, AttentionSpec, bind
from gpu_worker.attention.native import NativeAttention
from gpu_worker.batch import FlatBatch
from gpu_worker.kernels.library import Engine, WeightType
from gpu_worker.kernels.program import FlatRows
from gpu_worker.kv_cache import KvCache
from gpu_worker.loading import LoadedModel
from gpu_worker.models.decoder import forward
from gpu_worker.models.llama_native import NativeLlama
from gpu_worker.slots import Limits

Forward = Callable[[FlatBatch], Tensor]
"""Computes a batch, stores its KV, and returns logits where a token is sampled, (samples, vocab). They may be written
to, and hold until the next call."""


def torch_forward(
    model: LoadedModel, kv_cache: KvCache, backend: AttentionBackend[Any], spec: AttentionSpec
) -> Forward:
    """Return a forward pass of torch's operations, with attention by backend."""

    # What the layers of an iteration share is prepared once for all of the same window.
    specs = {window: replace(spec, window=window) for window in model.config.windows or (None,)}

    def run(batch: FlatBatch) -> Tensor:
        return forward(
            model.family,
            model.config,
            model.weights,
            kv_cache,
            {window: bind(backend, batch.layout, with_window) for window, with_window in specs.items()},
            token_ids=batch.token_ids,
            positions=batch.positions,
            slots=batch.slots,
            sampled=batch.sampled,
        )

    return run


def native_forward(native: NativeLlama) -> Forward:
    """Return a forward pass of our own kernels."""

    def run(batch: FlatBatch) -> Tensor:
        return native.forward(
            FlatRows(
                token_ids=batch.token_ids,
                positions=batch.positions,
                slots=batch.slots,
                sampled=batch.sampled,
                query_lens=torch.tensor(batch.layout.query_lens, dtype=torch.int32),
                kv_lens=torch.tensor(batch.layout.kv_lens, dtype=torch.int32),
                block_tables=batch.layout.block_tables,
            )
        )

    return run


def make_forward(
    model: LoadedModel,
    backend: AttentionBackend[Any],
    spec: AttentionSpec,
    limits: Limits,
    *,
    weight_type: WeightType | None = None,
) -> tuple[Forward, KvCache]:
    """Return the forward pass that goes with an attention back end, and its KV pool.

    Our own kernels copy the weights: nothing keeps the model's alive afterwards. weight_type is how they keep them,
    by default as the model has them.
    """
    config = model.config
    is_native = isinstance(backend, NativeAttention)
    allocate = KvCache.allocate_by_head if is_native else KvCache.allocate
    kv_cache = allocate(
        num_layers=config.num_layers,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=spec.dtype,
    )
    if not is_native:
        return torch_forward(model, kv_cache, backend, spec), kv_cache
    assert spec.kernels is not None, "the back end's probe has refused"
    native = NativeLlama(
        Engine(spec.kernels, torch.get_num_threads()),
        config,
        model.weights,
        kv_cache,
        weight_type=_weight_type_of(spec.dtype) if weight_type is None else weight_type,
        max_model_len=model.max_model_len,
        max_tokens=limits.max_chunk_tokens,
        max_samples=limits.max_num_slots,
    )
    return native_forward(native), kv_cache


def _weight_type_of(dtype: torch.dtype) -> WeightType:
    return WeightType.BFLOAT16 if dtype == torch.bfloat16 else WeightType.FLOAT32
