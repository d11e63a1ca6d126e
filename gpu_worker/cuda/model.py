"""Layers like Llama's for CUDA devices: what models/llama.py computes, with fewer passes over memory."""

from collections.abc import Callable, Mapping

from torch import Tensor

from gpu_worker.cuda.operations import Operations
from gpu_worker.kv_cache import KvCache
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import Attention, Family, ModelWeights


def is_fusible(family: Family, config: ModelConfig) -> bool:
    """Return whether fused_layers computes such a model. Sliding windows are attention's affair alone."""
    return (
        not family.unlike_llama
        and config.rope.rotated_share == 1
        and config.window_rope is None
        and config.embedding_scale == 1
        and config.head_dim.bit_count() == 1  # Triton counts a head's elements in powers of two.
    )


def fused_layers(
    config: ModelConfig,
    weights: ModelWeights,
    kv_cache: KvCache,
    operations: Operations,
    attend: Mapping[int | None, Attention],
    residual: Tensor,
    *,
    positions: Tensor,
    slots: Tensor,
    sampled: Tensor | None,
    reduce: Callable[[Tensor], Tensor],
    is_last: bool = True,
) -> Tensor:
    """Take one flat batch through the layers, and store its KV. Never waits.

    Args:
        config: The shape of the weights: of a part of the model where only that is here.
        weights: The layers.
        kv_cache: Written at slots, read by attend.
        operations: Matrix products, and what lies between them.
        attend: Attention prepared for this batch, by each window that a layer has.
        residual: (tokens, hidden), what the layers before have made of the tokens; written to.
        positions: (tokens,) int64, each token's place in its own request.
        slots: (tokens,) int64, where each token's KV goes.
        sampled: (samples,) int64, indices into the batch, after whose last layer nobody asks for the others; None asks
            for all.
        reduce: Sums a product over the ranks that each have a part of its inputs; may write to it.
        is_last: Whether the model's last layer is among these.

    Returns:
        What the head takes, (samples, hidden) of the weights' dtype, after the last norm; what the next layer takes,
        where these are not the last.
    """
    eps = config.rms_norm_eps
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
        added = reduce(operations.linear(attended, layer.attention_output))
        normed = operations.add_and_norm(residual, added, layer.mlp_norm, eps)
        activated = operations.silu_and_multiply(operations.linear(normed, layer.gate_up))
        added = reduce(operations.linear(activated, layer.down))
    assert added is not None, "every part has a layer"
    return operations.add_and_norm(residual, added, weights.final_norm, eps) if is_last else residual.add_(added)
