"""Mistral (Jiang et al. 2023): Llama's layers, with a sliding window over the last tokens in the first version."""

from dataclasses import replace

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.hf_config import HfConfig, parse, shape_of
from gpu_worker.models.llama import Llama


class _Config(HfConfig):
    sliding_window: int | None = 4096  # null from version 0.2 on


class Mistral(Llama):
    architecture = "MistralForCausalLM"

    def config(self, data: bytes) -> ModelConfig:
        config = parse(data, _Config)
        return replace(shape_of(config), windows=(config.sliding_window,) * config.num_hidden_layers)
