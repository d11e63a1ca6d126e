"""The shape of a model, whatever its family."""

from dataclasses import dataclass, replace

from common.cost.shapes import ModelShape
from gpu_worker.models.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the weights' shapes and the common part of the forward pass follow from."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int  # positions that it was trained for
    is_tied: bool  # the head is the embedding
    windows: tuple[int | None, ...] = ()  # by layer: a token sees so many, itself included; empty: all see all
    window_rope: RopeConfig | None = None  # of layers with a window, where it is another one
    attention_scale: float | None = None  # of scores, where it is not 1 / sqrt(head_dim)
    embedding_scale: float = 1.0

    def window_of(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def served_up_to(self, max_model_len: int) -> "ModelConfig":
        """The same for requests of at most so many tokens: a window that no request outgrows is none."""
        windows = tuple(None if window is None or window >= max_model_len else window for window in self.windows)
        is_plain = self.window_rope is None and not any(windows)
        return replace(self, windows=() if is_plain else windows)

    def for_cost(self, *, bytes_per_weight: int, bytes_per_kv: int) -> ModelShape:
        """The figures that the cost model reckons with."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            bytes_per_weight=bytes_per_weight,
            bytes_per_kv=bytes_per_kv,
        )
