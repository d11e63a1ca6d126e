"""Llama (Touvron et al. 2023; Llama 2 and 3, SmolLM2, and what else shares the architecture)."""

from torch import Tensor
from torch.nn import functional

from gpu_worker.errors import UnusableModel
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import LayerWeights, Reader, Step, gated_mlp, project, rms_norm, split
from gpu_worker.models.hf_config import HfConfig, parse, shape_of


class _Config(HfConfig):
    attention_bias: bool = False
    mlp_bias: bool = False


class Llama:
    """The plainest of them; others differ from it."""

    architecture = "LlamaForCausalLM"
    unlike_llama = ""

    def config(self, data: bytes) -> ModelConfig:
        config = parse(data, _Config)
        for name, has_bias in (("attention_bias", config.attention_bias), ("mlp_bias", config.mlp_bias)):
            if has_bias:
                raise UnusableModel(f"{name} is not supported for {self.architecture}")
        return shape_of(config)

    def read_norm(self, reader: Reader, name: str, size: int) -> Tensor:
        return reader.one(name, (size,))

    def read_layer(self, reader: Reader, config: ModelConfig, prefix: str) -> LayerWeights:
        query, key, value, output = (f"{prefix}self_attn.{part}_proj.weight" for part in "qkvo")
        gate, up, down = (f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
        hidden, intermediate = config.hidden_size, config.intermediate_size
        num_heads_in_all = config.num_heads + 2 * config.num_kv_heads
        return LayerWeights(
            attention_norm=self.read_norm(reader, f"{prefix}input_layernorm.weight", hidden),
            query_key_value=reader.stacked((query, key, value), (num_heads_in_all * config.head_dim, hidden)),
            attention_output=reader.one(output, (hidden, config.num_heads * config.head_dim)),
            mlp_norm=self.read_norm(reader, f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=reader.stacked((gate, up), (2 * intermediate, hidden)),
            down=reader.one(down, (hidden, intermediate)),
        )

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def layer(self, config: ModelConfig, weights: LayerWeights, step: Step, hidden: Tensor) -> Tensor:
        together, values = project(config, weights, rms_norm(hidden, weights.attention_norm, config.rms_norm_eps))
        attended = step.attend(*split(config, step.rotate(together)), values)
        hidden = step.going_on(hidden) + step.reduce(functional.linear(attended, weights.attention_output))
        normed = rms_norm(hidden, weights.mlp_norm, config.rms_norm_eps)
        return hidden + step.reduce(gated_mlp(weights, normed, functional.silu))
