"""The head of a GGUF file: metadata, and where its tensors lie. One pass, no dependency.

The gguf package's own reader makes several numpy objects for each of a tokenizer's 100,000 strings, which takes five
seconds for a model of 100 MB; here unwanted values are stepped over.

Source: the GGUF specification in the ggml repository (docs/gguf.md), versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class DamagedGguf(Exception):
    """The file is no GGUF file of a version that we know, or breaks off."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies, and how it is coded."""

    name: str
    shape: tuple[int, ...]  # outermost first, as torch has it; the file says it the other way round
    kind: int  # the specification's ggml_type
    offset: int  # in the file


@dataclass(frozen=True, slots=True)
class GgufHead:
    """Everything but the tensors' data."""

    metadata: dict[str, Any]  # what was wanted
    tensors: dict[str, TensorInfo]


def read_head(data: mmap.mmap, wants: Callable[[str], bool]) -> GgufHead:
    """Return the head of the file; of its metadata, the values whose key wants accepts.

    Raises:
        DamagedGguf: With what is wrong.
    """
    try:
        return _Cursor(data).head(wants)
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise DamagedGguf(str(error) or repr(error)) from error


class _Cursor:
    """A place in the file, moving on with each value read."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = 0

    def head(self, wants: Callable[[str], bool]) -> GgufHead:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._offset = 4
        if (version := self._number("I")) not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS}")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(num_fields):
            key, kind = self._string(), self._number("I")
            if key == "general.alignment":
                alignment = self._value(kind)
            elif wants(key):
                metadata[key] = self._value(kind)
            else:
                self._skip(kind)
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        start = -(-self._offset // alignment) * alignment
        tensors = {name: TensorInfo(name, shape, kind, start + offset) for name, shape, kind, offset in infos}
        return GgufHead(metadata, tensors)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dimensions)]))
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_FORMATS[kind])
        item_kind, length = self._number("I"), self._number("Q")
        if item_kind in _FORMATS:
            form = f"<{length}{_FORMATS[item_kind]}"
            values = struct.unpack_from(form, self._data, self._offset)
            self._offset += struct.calcsize(form)
            return list(values)
        return [self._value(item_kind) for _ in range(length)]

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._skip_strings(1)
        elif kind != _ARRAY:
            self._offset += struct.calcsize(f"<{_FORMATS[kind]}")
        else:
            item_kind, length = self._number("I"), self._number("Q")
            if item_kind == _STRING:
                self._skip_strings(length)
            elif item_kind == _ARRAY:
                for _ in range(length):
                    self._skip(item_kind)
            else:
                self._offset += length * struct.calcsize(f"<{_FORMATS[item_kind]}")

    def _skip_strings(self, length: int) -> None:
        length_of = struct.Struct("<Q").unpack_from
        offset = self._offset
        for _ in range(length):
            offset += 8 + length_of(self._data, offset)[0]
        self._offset = offset

    def _string(self) -> str:
        length = self._number("Q")
        end = self._offset + length
        if end > len(self._data):
            raise IndexError(f"a string of {length} bytes at {self._offset} passes the end")
        text = self._data[self._offset : end].decode()
        self._offset = end
        return text

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._offset)
        self._offset += struct.calcsize(f"<{code}")
        return value
