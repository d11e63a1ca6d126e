"""Qwen3 (Yang et al. 2025): Llama's layers, with each head's query and key normalised before they are rotated."""

from dataclasses import replace

from torch import Tensor
from torch.nn import functional

from gpu_worker.errors import UnusableModel
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import LayerWeights, Reader, Step, gated_mlp, project, rms_norm, split
from gpu_worker.models.hf_config import parse, shape_of
from gpu_worker.models.llama import Llama
from gpu_worker.models.qwen2 import QwenConfig


class _Config(QwenConfig):
    head_dim: int | None = 128
    attention_bias: bool = False


class Qwen3(Llama):
    architecture = "Qwen3ForCausalLM"
    unlike_llama = "norms of queries and keys"

    def config(self, data: bytes) -> ModelConfig:
        config = parse(data, _Config)
        if config.attention_bias:
            raise UnusableModel(f"attention_bias is not supported for {self.architecture}")
        return replace(shape_of(config), windows=config.windows())

    def read_layer(self, reader: Reader, config: ModelConfig, prefix: str) -> LayerWeights:
        return replace(
            super().read_layer(reader, config, prefix),
            query_norm=self.read_norm(reader, f"{prefix}self_attn.q_norm.weight", config.head_dim),
            key_norm=self.read_norm(reader, f"{prefix}self_attn.k_norm.weight", config.head_dim),
        )

    def layer(self, config: ModelConfig, weights: LayerWeights, step: Step, hidden: Tensor) -> Tensor:
        assert weights.query_norm is not None, "read_layer has read it"
        assert weights.key_norm is not None, "read_layer has read it"
        eps = config.rms_norm_eps
        together, values = project(config, weights, rms_norm(hidden, weights.attention_norm, eps))
        queries, keys = split(config, together)
        queries, keys = rms_norm(queries, weights.query_norm, eps), rms_norm(keys, weights.key_norm, eps)
        attended = step.attend(step.rotate(queries), step.rotate(keys), values)
        hidden = step.going_on(hidden) + step.reduce(functional.linear(attended, weights.attention_output))
        normed = rms_norm(hidden, weights.mlp_norm, eps)
        return hidden + step.reduce(gated_mlp(weights, normed, functional.silu))
