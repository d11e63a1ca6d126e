"""What all families share: pre-norm decoder layers with rotary positions, grouped-query attention and a gated MLP.

Plain functions over a frozen structure of weights. Projections that read the same input are fused: one matrix product
for query, key and value, one for gate and up. A family's own file says how its layers put these parts together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.kv_cache import KvCache
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.rope import rotate

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""See gpu_worker.attention.base.BoundAttention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Matrices are (outputs, inputs). What a family does not have is None."""

    attention_norm: Tensor  # (hidden,)
    query_key_value: Tensor  # ((heads + 2 * kv_heads) * head_dim, hidden)
    attention_output: Tensor  # (hidden, heads * head_dim)
    mlp_norm: Tensor  # (hidden,)
    gate_up: Tensor  # (2 * intermediate, hidden)
    down: Tensor  # (hidden, intermediate)
    query_key_value_bias: Tensor | None = None  # (outputs,)
    query_norm: Tensor | None = None  # (head_dim,)
    key_norm: Tensor | None = None  # (head_dim,)
    after_attention_norm: Tensor | None = None  # (hidden,), before its output joins the residual stream
    after_mlp_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """A whole model; all of one dtype, but for norms that a family keeps in float32."""

    embedding: Tensor  # (vocab, hidden)
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # (hidden,)
    head: Tensor  # (vocab, hidden); the embedding itself where tied
    cosine: Tensor  # (max_model_len, rotated dimensions / 2)
    sine: Tensor
    window_cosine: Tensor | None = None  # of layers with a window, where theirs are others
    window_sine: Tensor | None = None


class Reader(Protocol):
    """Reads tensors of a model's files, and checks their shapes."""

    def one(self, name: str, shape: tuple[int, ...], *, is_wide: bool = False) -> Tensor:
        """Return a tensor in the model's dtype, or where is_wide in float32."""

    def stacked(self, names: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
        """Return the tensors of these names one under another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One layer's part of an iteration."""

    cosine: Tensor  # (tokens, 1, rotated dimensions / 2), the same for every head
    sine: Tensor
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]  # stores keys and values, and attends
    sampled: Tensor | None  # in the last layer: only these tokens go on, as only the KV of the others matters
    reduce: Callable[[Tensor], Tensor]  # sums a product over the ranks that have a part of its inputs each

    def rotate(self, heads: Tensor) -> Tensor:
        return rotate(heads, self.cosine, self.sine)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention of the tokens that go on, (tokens, heads * head_dim)."""
        return self.going_on(self.attention(queries, keys, values)).flatten(1)

    def going_on(self, rows: Tensor) -> Tensor:
        """The rows of tokens that later layers, or the head, look at."""
        return rows if self.sampled is None else rows[self.sampled]


class Family(Protocol):
    """A family of models: how its layers are computed, and what their weights are called."""

    architecture: str
    """As Hugging Face's config.json names it."""
    unlike_llama: str
    """What its layers do that Llama's do not, whatever the configuration; empty for those that do the same."""

    def config(self, data: bytes) -> ModelConfig:
        """Return the shape that config.json describes.

        Raises:
            msgspec.DecodeError: If a field is missing or has a wrong type.
            UnusableModel: If the model cannot be served.
        """

    def read_norm(self, reader: Reader, name: str, size: int) -> Tensor:
        """Read the weights of a norm."""

    def read_layer(self, reader: Reader, config: ModelConfig, prefix: str) -> LayerWeights:
        """Read a layer whose tensors' names begin with prefix."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x scaled to unit mean square along its last dimension, then by weight."""

    def layer(self, config: ModelConfig, weights: LayerWeights, step: Step, hidden: Tensor) -> Tensor:
        """Return the residual stream after one layer, (tokens, hidden), of those tokens that go on."""


def forward(
    family: Family,
    config: ModelConfig,
    weights: ModelWeights,
    kv_cache: KvCache,
    attend: Mapping[int | None, Attention],
    *,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampled: Tensor,
) -> Tensor:
    """Compute one flat batch: store its KV, and return logits where a token is to be sampled.

    Args:
        family: The model's.
        config: The model's shape.
        weights: Its weights.
        kv_cache: Written at slots, read by attend.
        attend: Attention prepared for this batch, by each window that a layer has.
        token_ids: (tokens,) int64.
        positions: (tokens,) int64, each token's place in its own request.
        slots: (tokens,) int64, where each token's KV goes (see kv_cache.slots_of).
        sampled: (samples,) int64, indices into the batch.

    Returns:
        (samples, vocab) logits of the weights' dtype.
    """
    hidden = run_layers(
        family,
        config,
        weights,
        kv_cache,
        attend,
        scaled(config, functional.embedding(token_ids, weights.embedding)),
        positions=positions,
        slots=slots,
        sampled=sampled,
        reduce=as_it_is,
    )
    return head(family, config, weights, hidden)


def scaled(config: ModelConfig, embedded: Tensor) -> Tensor:
    """Return what the first layer takes of tokens' embeddings, (tokens, hidden)."""
    if config.embedding_scale == 1:
        return embedded
    return embedded * torch.tensor(config.embedding_scale, dtype=embedded.dtype)


def run_layers(
    family: Family,
    config: ModelConfig,
    weights: ModelWeights,
    kv_cache: KvCache,
    attend: Mapping[int | None, Attention],
    hidden: Tensor,
    *,
    positions: Tensor,
    slots: Tensor,
    sampled: Tensor | None,
    reduce: Callable[[Tensor], Tensor],
) -> Tensor:
    """Take one flat batch through the layers, and store its KV.

    Args:
        family: The model's.
        config: The shape of the weights: of a part of the model where only that is here.
        weights: The layers.
        kv_cache: Written at slots, read by attend.
        attend: Attention prepared for this batch, by each window that a layer has.
        hidden: (tokens, hidden), what the layers before have made of the tokens.
        positions: (tokens,) int64, each token's place in its own request.
        slots: (tokens,) int64, where each token's KV goes (see kv_cache.slots_of).
        sampled: (samples,) int64, indices into the batch, after whose last layer nobody asks for the others; None asks
            for all.
        reduce: Sums a product over the ranks that each have a part of its inputs; may write to it.

    Returns:
        (samples, hidden), or (tokens, hidden) where sampled is None.
    """
    rotation = (weights.cosine[positions].unsqueeze(1), weights.sine[positions].unsqueeze(1))
    in_window = rotation
    if weights.window_cosine is not None and weights.window_sine is not None:
        in_window = (weights.window_cosine[positions].unsqueeze(1), weights.window_sine[positions].unsqueeze(1))
    for index, layer in enumerate(weights.layers):
        window = config.window_of(index)
        cosine, sine = rotation if window is None else in_window

        def attention(queries: Tensor, keys: Tensor, values: Tensor, index: int = index) -> Tensor:
            kv_cache.write(index, slots, keys, values)
            return attend[config.window_of(index)](queries, kv_cache.keys[index], kv_cache.values[index])

        is_last = index == config.num_layers - 1
        step = Step(cosine=cosine, sine=sine, attention=attention, sampled=sampled if is_last else None, reduce=reduce)
        hidden = family.layer(config, layer, step, hidden)
    return hidden


def head(family: Family, config: ModelConfig, weights: ModelWeights, hidden: Tensor) -> Tensor:
    """Return logits, (samples, words of the head), of hidden, (samples, hidden)."""
    return functional.linear(family.norm(hidden, weights.final_norm, config.rms_norm_eps), weights.head)


def as_it_is(product: Tensor) -> Tensor:
    """What run_layers needs in place of a sum over ranks where there is one."""
    return product


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x scaled to unit mean square along its last dimension, then by weight. Squares are summed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def project(config: ModelConfig, weights: LayerWeights, normed: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys side by side, (tokens, heads + kv_heads, head_dim), and values, (tokens, kv_heads,
    head_dim)."""
    projected = functional.linear(normed, weights.query_key_value, weights.query_key_value_bias)
    num_rotated = config.num_heads + config.num_kv_heads
    by_head = projected.view(-1, num_rotated + config.num_kv_heads, config.head_dim)
    return by_head[:, :num_rotated], by_head[:, num_rotated:]


def split(config: ModelConfig, queries_and_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries, (tokens, heads, head_dim), and keys, (tokens, kv_heads, head_dim)."""
    return queries_and_keys[:, : config.num_heads], queries_and_keys[:, config.num_heads :]


def gated_mlp(weights: LayerWeights, normed: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = functional.linear(normed, weights.gate_up).chunk(2, dim=-1)  # (tokens, intermediate) each
    return functional.linear(activate(gate) * up, weights.down)
