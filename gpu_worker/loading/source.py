"""What every file format comes down to: a model's shape and facts, and tensors by their Hugging Face names."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model's files, opened. Tensors are read one at a time, so that no second copy of the model is ever whole."""

    family: Family
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    tensor_names: frozenset[str]  # Hugging Face names
    read: Callable[[str], Tensor]  # by such a name; in the file's own precision, or float32 if it was quantised
    read_part: Callable[[str, slice, slice], Tensor] | None = (
        None  # the same of some rows and columns, where a file can
    )
    is_coded: bool = False  # reading computes, so that several threads are faster; read may be called by several
    dummy_seed: int | None = None  # weights are drawn at random by it instead, and nothing is read

    def part(self, name: str, *, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Return rows and columns of a tensor (of a vector rows alone); read no more where the file allows."""
        row_slice = slice(None) if rows is None else slice(rows.start, rows.stop)
        column_slice = slice(None) if columns is None else slice(columns.start, columns.stop)
        if self.read_part is not None:
            return self.read_part(name, row_slice, column_slice)
        whole = self.read(name)
        return whole[row_slice] if whole.dim() == 1 else whole[row_slice, column_slice]


def dummy_source(family: Family, config: ModelConfig, eos_token_ids: tuple[int, ...], seed: int) -> ModelSource:
    """Return a model of this shape whose weights are drawn at random."""

    def read(name: str) -> Tensor:
        raise AssertionError(f"{name} is drawn, not read")

    return ModelSource(
        family=family,
        config=config,
        eos_token_ids=eos_token_ids,
        tensor_names=frozenset(),
        read=read,
        dummy_seed=seed,
    )
