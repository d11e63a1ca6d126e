"""From files to a model in memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from common.models import ModelFiles
from gpu_worker.errors import UnusableModel
from gpu_worker.loading.dummy import DummyReader
from gpu_worker.loading.read_ahead import ReadAhead
from gpu_worker.loading.source import ModelSource
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import Family, ModelWeights, Reader
from gpu_worker.models.rope import rotation_table

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"
_MAX_NAMED = 8
"""Tensor names spelt out in an error; the rest is a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run."""

    family: Family
    config: ModelConfig  # windows that no request outgrows left out
    weights: ModelWeights
    eos_token_ids: tuple[int, ...]
    max_model_len: int  # what is served, at most what config says


def open_model(files: ModelFiles, *, dummy_seed: int | None = None) -> ModelSource:
    """Open a model's files and read its shape; no weights yet.

    With dummy_seed there need not be any: they will be drawn at random, for a directory's config.json.

    Raises:
        OSError: If a file cannot be read.
        UnusableModel: If the model cannot be served.
    """
    # Here, not above: a worker of one format needs only that format's package.
    if files.gguf is not None:
        if dummy_seed is not None:
            raise UnusableModel("--load-format dummy takes a directory with a config.json, not a GGUF file")
        from gpu_worker.loading.gguf_model import open_gguf  # noqa: PLC0415

        return open_gguf(files.gguf)
    from gpu_worker.loading.huggingface import open_config, open_directory  # noqa: PLC0415

    assert files.directory is not None, "ModelFiles has one of gguf and directory"
    return open_directory(files.directory) if dummy_seed is None else open_config(files.directory, dummy_seed)


Copy = Callable[[Tensor, Tensor], None]
"""Copies a host tensor, the second, to a tensor of the model; it may be unfinished when it returns."""


def plain_copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def load_model(
    source: ModelSource,
    dtype: torch.dtype,
    max_model_len: int = 0,
    device: torch.device | str = "cpu",
    copy: Copy = plain_copy,
) -> LoadedModel:
    """Read all weights as dtype.

    Args:
        source: An open model.
        dtype: Of weights and rotation table.
        max_model_len: Serve no longer requests than this; 0 serves what the model was trained for.
        device: Where the weights go, each tensor by itself: no host memory ever holds the whole model.
        copy: How they get there.

    Raises:
        OSError: If a file cannot be read.
        UnusableModel: If tensors are missing, unexpected or of a wrong shape, or max_model_len is beyond the model's.
    """
    config = source.config
    if max_model_len > config.max_model_len:
        raise UnusableModel(f"--max-model-len is {max_model_len}; this model was trained for {config.max_model_len}")
    served_len = max_model_len or config.max_model_len
    config = config.served_up_to(served_len)
    _check_shape(config)
    device = torch.device(device)
    family = source.family
    cosine, sine = (table.to(device) for table in rotation_table(config.rope, config.head_dim, served_len, dtype))
    window_cosine, window_sine = None, None
    if config.window_rope is not None:
        in_window = rotation_table(config.window_rope, config.head_dim, served_len, dtype)
        window_cosine, window_sine = (table.to(device) for table in in_window)
    with _reading(source, dtype, device, copy) as reader:
        embedding = reader.one(_EMBEDDING, (config.vocab_size, config.hidden_size))
        weights = ModelWeights(
            embedding=embedding,
            layers=tuple(family.read_layer(reader, config, _prefix(index)) for index in range(config.num_layers)),
            final_norm=family.read_norm(reader, _FINAL_NORM, config.hidden_size),
            head=embedding if config.is_tied else reader.one(_HEAD, (config.vocab_size, config.hidden_size)),
            cosine=cosine,
            sine=sine,
            window_cosine=window_cosine,
            window_sine=window_sine,
        )
    return LoadedModel(
        family=family, config=config, weights=weights, eos_token_ids=source.eos_token_ids, max_model_len=served_len
    )


@contextmanager
def _reading(source: ModelSource, dtype: torch.dtype, device: torch.device, copy: Copy) -> Iterator[Reader]:
    if source.dummy_seed is not None:
        yield DummyReader(source.dummy_seed, dtype, device)
        return
    names = _checked_names(source)
    if not source.is_coded:
        yield _Reader(source.read, dtype, device, copy)
        return
    with ReadAhead(source.read, names) as read:
        yield _Reader(read, dtype, device, copy)


class _Reader:
    """Reads tensors into their final place and dtype, and checks their shapes."""

    def __init__(self, read: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device, copy: Copy) -> None:
        self._read = read
        self._dtype = dtype
        self._device = device
        self._copy = copy

    def one(self, name: str, shape: tuple[int, ...], *, is_wide: bool = False) -> Tensor:
        return self._stacked((name,), shape, torch.float32 if is_wide else self._dtype)

    def stacked(self, names: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
        return self._stacked(names, shape, self._dtype)

    def _stacked(self, names: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        num_rows = 0
        for name in names:
            part = self._read(name)
            if part.shape[1:] != shape[1:] or num_rows + part.shape[0] > shape[0]:
                raise UnusableModel(f"tensor {name!r} has shape {tuple(part.shape)}; {shape} was expected of {names}")
            self._copy(whole[num_rows : num_rows + part.shape[0]], part)
            num_rows += part.shape[0]
        if num_rows != shape[0]:
            raise UnusableModel(f"tensors {names} have {num_rows} rows together; {shape[0]} were expected")
        return whole


class _Names:
    """Notes which tensors a family would read, and reads nothing."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}  # in that order

    def one(self, name: str, shape: tuple[int, ...], *, is_wide: bool = False) -> Tensor:
        return self.stacked((name,), shape)

    def stacked(self, names: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
        self.names.update(dict.fromkeys(names))
        return torch.empty(shape, device="meta")


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _check_shape(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise UnusableModel(f"{config.num_heads} heads are no multiple of {config.num_kv_heads} key-value heads")
    if config.head_dim % 2:
        raise UnusableModel(f"rotary embeddings need an even head size; this one is {config.head_dim}")


def _checked_names(source: ModelSource) -> list[str]:
    """Return the names of all tensors that will be read, in that order.

    Raises:
        UnusableModel: If the files have others.
    """
    config, noted = source.config, _Names()
    noted.one(_EMBEDDING, ())
    for index in range(config.num_layers):
        source.family.read_layer(noted, config, _prefix(index))
    noted.one(_FINAL_NORM, ())
    # A tied model's files may hold the head again; an untied one's must.
    expected = [*noted.names] if config.is_tied else [*noted.names, _HEAD]
    problems = []
    if missing := sorted(set(expected) - source.tensor_names):
        problems.append(f"tensors are missing: {_some(missing)}")
    if unexpected := sorted(source.tensor_names - {*expected, _HEAD}):
        problems.append(f"tensors are unexpected: {_some(unexpected)}")
    if problems:
        raise UnusableModel("; ".join(problems))
    return expected


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + rest
