"""The model without pages, chunks or fused kernels, in float32: what the engine is compared with."""

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.loading import LoadedModel
from gpu_worker.models.decoder import rms_norm
from gpu_worker.models.rope import rotate, rotation_table


@torch.inference_mode()
def dense_logits(model: LoadedModel, token_ids: list[int]) -> Tensor:
    """Return the logits after each token, (tokens, vocab) float32. Weights are widened layer by layer."""
    config, weights = model.config, model.weights
    device = weights.embedding.device
    cosine, sine = (
        table.to(device).unsqueeze(1)
        for table in rotation_table(config.rope, config.head_dim, len(token_ids), torch.float32)
    )
    hidden = weights.embedding[torch.tensor(token_ids, device=device)].float()  # (tokens, hidden)
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    for layer in weights.layers:
        normed = rms_norm(hidden, layer.attention_norm.float(), config.rms_norm_eps)
        by_head = functional.linear(normed, layer.query_key_value.float()).view(len(token_ids), -1, config.head_dim)
        queries = rotate(by_head[:, :num_heads], cosine, sine).transpose(0, 1)  # (heads, tokens, head_dim)
        keys = rotate(by_head[:, num_heads : num_heads + num_kv_heads], cosine, sine).transpose(0, 1)
        values = by_head[:, num_heads + num_kv_heads :].transpose(0, 1)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        hidden = hidden + functional.linear(attended.transpose(0, 1).flatten(1), layer.attention_output.float())
        normed = rms_norm(hidden, layer.mlp_norm.float(), config.rms_norm_eps)
        gate, up = functional.linear(normed, layer.gate_up.float()).chunk(2, dim=-1)
        hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down.float())
    return functional.linear(rms_norm(hidden, weights.final_norm.float(), config.rms_norm_eps), weights.head.float())
