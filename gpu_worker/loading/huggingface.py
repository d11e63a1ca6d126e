"""A model out of a Hugging Face directory: config.json, generation_config.json, safetensors."""

from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.errors import UnusableModel
from gpu_worker.loading.source import ModelSource, dummy_source
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import Family
from gpu_worker.models.families import family_named
from gpu_worker.models.hf_config import TokenIds

_INDEX = "model.safetensors.index.json"


class _Config(msgspec.Struct):
    """What is read of config.json before its family is known."""

    architectures: list[str] | None = None
    eos_token_id: TokenIds = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: TokenIds = None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def open_directory(directory: Path) -> ModelSource:
    """Open a Hugging Face directory of a model of a known family.

    Raises:
        OSError: If a file cannot be read.
        UnusableModel: If the model cannot be served.
    """
    family, shape, eos_token_ids = _read_config(directory)
    file_of = _files_of(directory)
    handles: dict[Path, Any] = {}

    def read_part(name: str, rows: slice, columns: slice) -> Tensor:
        path = file_of[name]
        if path not in handles:
            handles[path] = _open(path)
        try:
            stored = handles[path].get_slice(name)
            part: Tensor = stored[rows] if len(stored.get_shape()) == 1 else stored[rows, columns]
        except SafetensorError as error:  # The index promised a tensor that the file lacks.
            raise UnusableModel(f"{path}: {error}") from error
        return part

    def read(name: str) -> Tensor:
        return read_part(name, slice(None), slice(None))

    # Old checkpoints saved a buffer of the rotary embedding in each layer; it follows from the configuration.
    names = frozenset(name for name in file_of if not name.endswith("rotary_emb.inv_freq"))
    return ModelSource(
        family=family,
        config=shape,
        eos_token_ids=eos_token_ids,
        tensor_names=names,
        read=read,
        read_part=read_part,
    )


def open_config(directory: Path, dummy_seed: int) -> ModelSource:
    """Open a directory of which only config.json and generation_config.json are read; weights will be random.

    Raises:
        OSError: If config.json cannot be read.
        UnusableModel: If such a model cannot be served.
    """
    family, shape, eos_token_ids = _read_config(directory)
    return dummy_source(family, shape, eos_token_ids, dummy_seed)


def _read_config(directory: Path) -> tuple[Family, ModelConfig, tuple[int, ...]]:
    """Return a model's family, its shape, and the ids that end a request."""
    path = directory / "config.json"
    config = _parse(path, _Config)
    family = family_named((config.architectures or [""])[0])
    try:
        shape = family.config(path.read_bytes())
    except msgspec.DecodeError as error:  # Also of a wrong type, or a field that is missing.
        raise UnusableModel(f"{path}: {error}") from error
    return family, shape, _eos_token_ids(directory, config)


def _parse(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:  # Also of a wrong type, or a field that is missing.
        raise UnusableModel(f"{path}: {error}") from error


def _files_of(directory: Path) -> dict[str, Path]:
    """Return the file that holds each tensor."""
    if (directory / _INDEX).is_file():
        index = _parse(directory / _INDEX, _Index)
        missing = sorted({file for file in index.weight_map.values() if not (directory / file).is_file()})
        if missing:
            raise UnusableModel(f"{_INDEX} names files that are not in {directory}: {', '.join(missing)}")
        return {name: directory / file for name, file in index.weight_map.items()}
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise UnusableModel(f"{directory} has no .safetensors file")
    file_of: dict[str, Path] = {}
    for path in paths:
        file_of.update(dict.fromkeys(_open(path).keys(), path))
    return file_of


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UnusableModel(f"{path}: {error}") from error


def _eos_token_ids(directory: Path, config: _Config) -> tuple[int, ...]:
    """Return the ids that end a request: generation_config.json's where it has any, else config.json's."""
    token_ids = config.eos_token_id
    if (directory / "generation_config.json").is_file():
        generation = _parse(directory / "generation_config.json", _GenerationConfig)
        token_ids = token_ids if generation.eos_token_id is None else generation.eos_token_id
    if token_ids is None:
        return ()
    return (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)
