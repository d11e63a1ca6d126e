"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's layers with biases on query, key and value."""

from dataclasses import replace

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import LayerWeights, Reader
from gpu_worker.models.hf_config import HfConfig, parse, shape_of, windows_of
from gpu_worker.models.llama import Llama


class QwenConfig(HfConfig):
    """The window is hardly ever on; where it is, the first max_window_layers layers are without."""

    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        if not self.use_sliding_window:
            return ()
        if self.layer_types is not None:
            return windows_of(self.layer_types, self.sliding_window)
        num_layers = self.num_hidden_layers
        return tuple(None if index < self.max_window_layers else self.sliding_window for index in range(num_layers))


class Qwen2(Llama):
    architecture = "Qwen2ForCausalLM"
    unlike_llama = "biases on queries, keys and values"

    def config(self, data: bytes) -> ModelConfig:
        config = parse(data, QwenConfig)
        return replace(shape_of(config), windows=config.windows())

    def read_layer(self, reader: Reader, config: ModelConfig, prefix: str) -> LayerWeights:
        names = tuple(f"{prefix}self_attn.{part}_proj.bias" for part in "qkv")
        num_outputs = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        bias = reader.stacked(names, (num_outputs,))
        return replace(super().read_layer(reader, config, prefix), query_key_value_bias=bias)
