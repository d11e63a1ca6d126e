"""Random weights for any shape: to measure a device without a download."""

import zlib

import torch
from torch import Tensor

DEVIATION = 0.02
"""Of the weights, about what models are initialised with: activations stay finite through any number of layers."""


class DummyReader:
    """Draws tensors where a loader would read them, in their final place and dtype.

    A tensor depends on seed, its names and the kind of device, not on the order of reading.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def one(self, name: str, shape: tuple[int, ...], *, is_wide: bool = False) -> Tensor:
        dtype = torch.float32 if is_wide else self._dtype
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self._device)
        return self.stacked((name,), shape).to(dtype)

    def stacked(self, names: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(" ".join(names).encode()) ^ self._seed)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0.0, DEVIATION, generator=generator)
