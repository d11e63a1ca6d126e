"""Phi-3 and Phi-4-mini (Abdin et al. 2024): Llama's layers, stored fused; a sliding window in some sizes; LongRoPE."""

from dataclasses import replace
from typing import Any

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import LayerWeights, Reader
from gpu_worker.models.hf_config import HfConfig, parse, rope_of, shape_of
from gpu_worker.models.llama import Llama


class _Config(HfConfig):
    sliding_window: int | None = None
    original_max_position_embeddings: int = 4096
    partial_rotary_factor: float = 1.0


class Phi3(Llama):
    architecture = "Phi3ForCausalLM"

    def config(self, data: bytes) -> ModelConfig:
        config = parse(data, _Config)
        described = config.rope_parameters or config.rope_scaling or {}
        # Older files say some of it outside, and have other names for LongRoPE.
        rope: dict[str, Any] = {
            "original_max_position_embeddings": config.original_max_position_embeddings,
            "partial_rotary_factor": config.partial_rotary_factor,
            **described,
        }
        if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            rope["rope_type"] = "longrope"
        return replace(
            shape_of(config, rope=rope_of(config, rope, may_be_partial=True)),
            windows=(config.sliding_window,) * config.num_hidden_layers,
        )

    def read_layer(self, reader: Reader, config: ModelConfig, prefix: str) -> LayerWeights:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        num_heads_in_all = config.num_heads + 2 * config.num_kv_heads
        qkv_shape = (num_heads_in_all * config.head_dim, hidden)
        return LayerWeights(
            attention_norm=self.read_norm(reader, f"{prefix}input_layernorm.weight", hidden),
            query_key_value=reader.one(f"{prefix}self_attn.qkv_proj.weight", qkv_shape),
            attention_output=reader.one(
                f"{prefix}self_attn.o_proj.weight", (hidden, config.num_heads * config.head_dim)
            ),
            mlp_norm=self.read_norm(reader, f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=reader.one(f"{prefix}mlp.gate_up_proj.weight", (2 * intermediate, hidden)),
            down=reader.one(f"{prefix}mlp.down_proj.weight", (hidden, intermediate)),
        )
