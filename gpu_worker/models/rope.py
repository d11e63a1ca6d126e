"""Rotary position embeddings: the frequencies of each kind of scaling, and the rotation."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gpu_worker.errors import UnusableModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Which frequency each pair of dimensions turns at."""

    theta: float
    kind: Literal["default", "linear", "llama3", "longrope"] = "default"
    factor: float = 1.0  # linear and llama3: by how much positions are stretched
    low_freq_factor: float = 1.0  # llama3 only, as the next two
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    divisors: tuple[float, ...] = ()  # one per frequency, from files that give them ready-made (GGUF); else empty
    rotated_share: float = 1.0  # of each head's dimensions, the first ones; the others know no position
    short_divisors: tuple[float, ...] = ()  # longrope only, as the next two: up to original_max_position tokens
    long_divisors: tuple[float, ...] = ()  # beyond
    attention_factor: float = 1.0  # on cosine and sine alike


def inverse_frequencies(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """Return the radians per position of each pair of rotated dimensions: (rotated / 2,) float32.

    Raises:
        UnusableModel: If the model's list of divisors has another length.
    """
    rotated = int(head_dim * rope.rotated_share)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(frequencies, rope)
        case "longrope":
            divisors = rope.short_divisors if num_positions <= rope.original_max_position else rope.long_divisors
            if len(divisors) != len(frequencies):
                raise UnusableModel(f"longrope has {len(divisors)} factors for {len(frequencies)} frequencies")
            return frequencies / torch.tensor(divisors, dtype=torch.float32)


def rotation_table(rope: RopeConfig, head_dim: int, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine for each position, both (num_positions, rotated / 2) of dtype.

    Angles are computed in float32, whatever dtype is: bfloat16 cannot tell position 4001 from 4002. LongRoPE's
    frequencies are chosen by the longest request that is served, once: keys in the cache cannot be turned again when a
    request outgrows the short ones, and those of other requests have to mean the same.
    """
    positions = torch.arange(num_positions, dtype=torch.int64).float()
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim, num_positions))
    factor = rope.attention_factor
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return x turned to its positions, in the half-split pairing of Hugging Face (dimension i with i + head_dim / 2).

    Args:
        x: (tokens, heads, head_dim).
        cosine: (tokens, 1, rotated / 2), as sine: the table's rows at the tokens' positions. Dimensions from rotated
            on stay as they are.
    """
    rotated = 2 * cosine.shape[-1]
    first, second = x[..., :rotated].chunk(2, dim=-1)  # (tokens, heads, rotated / 2) each
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(turned if rotated == x.shape[-1] else (*turned, x[..., rotated:]), dim=-1)


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Low frequencies are stretched, high ones kept, those between blended (as in Meta's code for Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > shortest_stretched, frequencies / rope.factor, frequencies)
    is_between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(is_between, blended, scaled)
