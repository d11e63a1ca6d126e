"""GGUF files: metadata, and tensors as numbers. common.gguf reads the head, the gguf package dequantises."""

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from common.gguf import DamagedGguf, read_head
from gpu_worker.errors import UnusableModel

_LEAST_ROW_ELEMENTS = 8192
"""The gguf package dequantises 16 rows at a time; rows shorter than this make it spend its time between them."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies, and how it is coded."""

    name: str
    shape: tuple[int, ...]  # outermost first, as torch has it; the file says it the other way round
    kind: GGMLQuantizationType
    offset: int  # in the file


class GgufFile:
    """An open GGUF file. metadata lacks what is the tokenizer's, but for its ids."""

    def __init__(self, path: Path) -> None:
        """Read everything but the tensors' data.

        Raises:
            OSError: If the file cannot be read.
            UnusableModel: If it is no GGUF file of a version that we know, or breaks off.
        """
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._path = path
        try:
            head = read_head(self._data, _is_wanted)
            self.metadata = head.metadata
            self.tensors = {
                info.name: GgufTensor(info.name, info.shape, GGMLQuantizationType(info.kind), info.offset)
                for info in head.tensors.values()
            }
        except (DamagedGguf, ValueError) as error:  # ValueError: a coding that the package has no name for.
            raise UnusableModel(f"{path}: not a readable GGUF file: {error}") from error

    def read(self, tensor: GgufTensor) -> NDArray[np.float32]:
        """Return a tensor's values as float32, in memory of their own.

        Raises:
            UnusableModel: If its coding is unknown to the gguf package, or the file ends before it does.
        """
        block_size, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        num_elements = int(np.prod(tensor.shape))
        num_bytes = num_elements // block_size * block_bytes
        if tensor.offset + num_bytes > len(self._data):
            raise UnusableModel(f"{self._path}: breaks off in tensor {tensor.name!r}")
        raw = np.frombuffer(self._data, dtype=np.uint8, count=num_bytes, offset=tensor.offset)
        try:
            values: NDArray[np.float32] = dequantize(raw.reshape(_num_long_rows(tensor), -1), tensor.kind)
        except NotImplementedError as error:
            raise UnusableModel(f"{self._path}: tensor {tensor.name!r} is coded as {tensor.kind.name}") from error
        # Values that were not coded are a view of the file, which is read-only.
        return np.require(values, requirements="W").reshape(tensor.shape)


def _is_wanted(key: str) -> bool:
    return not key.startswith("tokenizer.") or key.endswith(("_token_id", "_token_ids"))


def _num_long_rows(tensor: GgufTensor) -> int:
    """Return how many rows to see a tensor as, so that they are long. Rows are whole blocks, so any divisor will do."""
    num_rows = int(np.prod(tensor.shape[:-1]))
    row_elements = tensor.shape[-1]
    while row_elements < _LEAST_ROW_ELEMENTS and num_rows % 2 == 0:
        num_rows //= 2
        row_elements *= 2
    return num_rows
