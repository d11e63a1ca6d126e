"""Gemma 3, text only (Gemma Team 2025): five layers with a sliding window to each that sees all tokens.

Norms before and after both attention and MLP, whose weights are stored less 1; queries and keys normalised by head;
the two kinds of layers turn at different frequencies; the embedding is scaled and is the head as well.
"""

import math
from dataclasses import replace
from functools import partial

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.errors import UnusableModel
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import LayerWeights, Reader, Step, gated_mlp, project, split
from gpu_worker.models.hf_config import HfConfig, parse, rope_of, shape_of, windows_of
from gpu_worker.models.llama import Llama

_UNSUPPORTED = ("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
_gelu = partial(functional.gelu, approximate="tanh")


class _Config(HfConfig):
    hidden_act: str = msgspec.field(default="gelu_pytorch_tanh", name="hidden_activation")
    head_dim: int | None = 256
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6  # of older files: each such layer sees all tokens
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None


class Gemma3(Llama):
    architecture = "Gemma3ForCausalLM"
    unlike_llama = "norms after attention and MLP, and of queries and keys"

    def config(self, data: bytes) -> ModelConfig:
        config = parse(data, _Config)
        for name in _UNSUPPORTED:
            if getattr(config, name):
                raise UnusableModel(f"{name} is not supported for {self.architecture}")
        # Newer files have the frequencies of both kinds of layers in one place.
        both = config.rope_parameters or {}
        everywhere, in_window = both.get("full_attention"), both.get("sliding_attention")
        layer_types = config.layer_types or [
            "sliding_attention" if (index + 1) % config.sliding_window_pattern else "full_attention"
            for index in range(config.num_hidden_layers)
        ]
        return replace(
            shape_of(config, activation="gelu_pytorch_tanh", rope=rope_of(config, everywhere or config.rope_scaling)),
            windows=windows_of(layer_types, config.sliding_window),
            window_rope=rope_of(config, in_window, theta=config.rope_local_base_freq),
            attention_scale=config.query_pre_attn_scalar**-0.5,
            embedding_scale=math.sqrt(config.hidden_size),
        )

    def read_norm(self, reader: Reader, name: str, size: int) -> Tensor:
        # In float32: 1 + w of a small w would lose most of it in bfloat16.
        return reader.one(name, (size,), is_wide=True) + 1.0

    def read_layer(self, reader: Reader, config: ModelConfig, prefix: str) -> LayerWeights:
        def norm(name: str, size: int = config.hidden_size) -> Tensor:
            return self.read_norm(reader, f"{prefix}{name}.weight", size)

        return replace(
            super().read_layer(reader, config, prefix),
            after_attention_norm=norm("post_attention_layernorm"),  # Llama's name for the norm before the MLP
            mlp_norm=norm("pre_feedforward_layernorm"),
            after_mlp_norm=norm("post_feedforward_layernorm"),
            query_norm=norm("self_attn.q_norm", config.head_dim),
            key_norm=norm("self_attn.k_norm", config.head_dim),
        )

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As rms_norm, but rounded only after it is scaled by the float32 weight."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)

    def layer(self, config: ModelConfig, weights: LayerWeights, step: Step, hidden: Tensor) -> Tensor:
        assert weights.query_norm is not None, "read_layer has read it"
        assert weights.key_norm is not None, "read_layer has read it"
        assert weights.after_attention_norm is not None, "read_layer has read it"
        assert weights.after_mlp_norm is not None, "read_layer has read it"
        norm = partial(self.norm, eps=config.rms_norm_eps)
        together, values = project(config, weights, norm(hidden, weights.attention_norm))
        queries, keys = split(config, together)
        queries, keys = norm(queries, weights.query_norm), norm(keys, weights.key_norm)
        attended = functional.linear(
            step.attend(step.rotate(queries), step.rotate(keys), values), weights.attention_output
        )
        hidden = step.going_on(hidden) + norm(step.reduce(attended), weights.after_attention_norm)
        activated = step.reduce(gated_mlp(weights, norm(hidden, weights.mlp_norm), _gelu))
        return hidden + norm(activated, weights.after_mlp_norm)
