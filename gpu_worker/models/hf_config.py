"""What Hugging Face's config.json says of every family, and the parts of a shape that follow from it."""

import math
from typing import Any, TypeVar

import msgspec

from gpu_worker.errors import UnusableModel
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.rope import RopeConfig

_ROPE_KINDS = ("default", "linear", "llama3", "longrope")
TokenIds = int | list[int] | None
ConfigT = TypeVar("ConfigT", bound="HfConfig")


class HfConfig(msgspec.Struct):
    """Fields that families share. A family adds its own, with the defaults of transformers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # its newer name, with rope_theta in it
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"


class _Rope(msgspec.Struct):
    rope_type: str = ""
    type: str = ""  # its name before rope_type
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None


def parse(data: bytes, kind: type[ConfigT]) -> ConfigT:
    """Return config.json as kind.

    Raises:
        msgspec.DecodeError: If a field is missing or has a wrong type.
    """
    return msgspec.json.decode(data, type=kind)


def shape_of(config: HfConfig, *, activation: str = "silu", rope: RopeConfig | None = None) -> ModelConfig:
    """Return the shape, for a family whose MLP has this activation; rope where the family says it differently.

    Raises:
        UnusableModel: If the model has another activation, or positions that cannot be served.
    """
    if config.hidden_act != activation:
        raise UnusableModel(f"hidden_act {config.hidden_act!r} is not supported; known: {activation}")
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope=rope or rope_of(config, config.rope_parameters or config.rope_scaling),
        max_model_len=config.max_position_embeddings,
        is_tied=config.tie_word_embeddings,
    )


def windows_of(layer_types: list[str], window: int | None) -> tuple[int | None, ...]:
    """Return each layer's window.

    Raises:
        UnusableModel: If there is a type of layer that is neither with a window nor without.
    """
    if unknown := sorted(set(layer_types) - {"full_attention", "sliding_attention"}):
        raise UnusableModel(f"layer type {unknown[0]!r} is not supported; known: full_attention, sliding_attention")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def rope_of(
    config: HfConfig, described: dict[str, Any] | None, *, theta: float | None = None, may_be_partial: bool = False
) -> RopeConfig:
    """Return the frequencies of rope_parameters or rope_scaling.

    Args:
        config: The whole.
        described: The part that says it, if any.
        theta: What holds where that does not say so; the configuration's by default.
        may_be_partial: Whether the family knows heads of which only the first dimensions are rotated.

    Raises:
        msgspec.ValidationError: If a field has a wrong type.
        UnusableModel: If they are scaled in a way that cannot be served.
    """
    rope = msgspec.convert(described or {}, _Rope)
    kind = rope.rope_type or rope.type or "default"
    base = theta or config.rope_theta
    base = base if rope.rope_theta is None else rope.rope_theta
    share = rope.partial_rotary_factor
    if share != 1 and not may_be_partial:
        raise UnusableModel(f"partial_rotary_factor {share:g} is not supported")
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    match kind:
        case "default":
            return RopeConfig(theta=base, rotated_share=share)
        case "linear":
            return RopeConfig(theta=base, kind="linear", factor=rope.factor or 1.0, rotated_share=share)
        case "llama3":
            return RopeConfig(
                theta=base,
                kind="llama3",
                factor=rope.factor or 1.0,
                low_freq_factor=rope.low_freq_factor,
                high_freq_factor=rope.high_freq_factor,
                original_max_position=original,
                rotated_share=share,
            )
        case "longrope":
            return RopeConfig(
                theta=base,
                kind="longrope",
                original_max_position=original,
                short_divisors=rope.short_factor,
                long_divisors=rope.long_factor,
                attention_factor=_longrope_attention_factor(rope, config.max_position_embeddings, original),
                rotated_share=share,
            )
        case _:
            # "dynamic" is here too: it turns old keys at other frequencies as a request grows, so none could be cached.
            raise UnusableModel(f"rope scaling {kind!r} is not supported; known: {', '.join(_ROPE_KINDS)}")


def _longrope_attention_factor(rope: _Rope, max_position: int, original: int) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = max_position / original if rope.factor is None else rope.factor
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
