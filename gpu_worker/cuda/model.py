"""Layers like Llama's for CUDA devices: what models/llama.py computes, with fewer passes over memory."""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from gpu_worker.cuda.operations import Operations
from gpu_worker.kv_cache import KvCache
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import Attention, Family, ModelWeights, as_it_is, run_layers, scaled


def is_fusible(family: Family, config: ModelConfig) -> bool:
    """Return whether fused_hidden computes such a model. Sliding windows are attention's affair alone."""
    return (
        not family.unlike_llama
        and config.rope.rotated_share == 1
        and config.window_rope is None
        and config.embedding_scale == 1
    )


def fused_hidden(
    config: ModelConfig,
    weights: ModelWeights,
    kv_cache: KvCache,
    operations: Operations,
    attend: Mapping[int | None, Attention],
    *,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampled: Tensor | None,
) -> Tensor:
    """Compute one flat batch: store its KV, and return what the head takes where logits are wanted. Never waits.

    Args:
        config: The model's shape.
        weights: Its weights.
        kv_cache: Written at slots, read by attend.
        operations: Matrix products, and what lies between them.
        attend: Attention prepared for this batch, by each window that a layer has.
        token_ids: (tokens,) of any integer dtype.
        positions: (tokens,) int64, each token's place in its own request.
        slots: (tokens,) int64, where each token's KV goes.
        sampled: (samples,) int64, indices into the batch; None for all of it.

    Returns:
        (samples, hidden) of the weights' dtype, after the last norm.
    """
    eps = config.rms_norm_eps
    residual = functional.embedding(token_ids, weights.embedding)  # (tokens, hidden), added to in place from here on
    added: Tensor | None = None
    for index, layer in enumerate(weights.layers):
        normed = operations.add_and_norm(residual, added, layer.attention_norm, eps)
        queries = operations.rotate_and_store(
            operations.linear(normed, layer.query_key_value),
            positions=positions,
            slots=slots,
            cosine=weights.cosine,
            sine=weights.sine,
            keys=kv_cache.keys[index],
            values=kv_cache.values[index],
            num_heads=config.num_heads,
        )
        attention = attend[config.window_of(index)]
        attended = attention(queries, kv_cache.keys[index], kv_cache.values[index]).flatten(1)
        if sampled is not None and index == config.num_layers - 1:
            # Only the KV of the last layer concerns tokens that are not sampled.
            residual, attended = residual[sampled], attended[sampled]
        added = operations.linear(attended, layer.attention_output)
        normed = operations.add_and_norm(residual, added, layer.mlp_norm, eps)
        activated = operations.silu_and_multiply(operations.linear(normed, layer.gate_up))
        added = operations.linear(activated, layer.down)
    return operations.add_and_norm(residual, added, weights.final_norm, eps)


def plain_hidden(
    family: Family,
    config: ModelConfig,
    weights: ModelWeights,
    kv_cache: KvCache,
    attend: Mapping[int | None, Attention],
    *,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampled: Tensor | None,
) -> Tensor:
    """Compute what fused_hidden computes, of any family, by torch's operations one by one."""
    hidden = run_layers(
        family,
        config,
        weights,
        kv_cache,
        attend,
        scaled(config, functional.embedding(token_ids, weights.embedding)),
        positions=positions,
        slots=slots,
        sampled=sampled,
        reduce=as_it_is,
    )
    return family.norm(hidden, weights.final_norm, config.rms_norm_eps)
