"""A rank's part of a model, as if it were a model of its own: fewer heads, fewer layers, shorter matrices.

Loading then needs to know nothing of ranks, and of each tensor only this rank's part is read where the file allows.
Matrices that make heads or intermediate units are split by rows, those that take them in again by columns, so that one
sum over the stage's ranks follows each pair of products. Embedding and head are split by words.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gpu_worker.errors import UnusableModel
from gpu_worker.loading.source import ModelSource
from gpu_worker.models.config import ModelConfig
from gpu_worker.parallel.layout import Layout

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_LAYERS = "model.layers."


def shard(source: ModelSource, layout: Layout) -> ModelSource:
    """Return the part of source that a rank holds.

    Its layers are counted from 0, and its vocabulary is the rank's share of words. A model is read with its embedding
    and its head; of several stages the first has no head and the last no embedding, so each of them stands in for
    what it lacks (as in a model that is tied), and a stage between has neither: a vocabulary of no words.

    Raises:
        UnusableModel: If the model does not come apart like this.
    """
    config = source.config
    layout.check(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        intermediate_size=config.intermediate_size,
    )
    layers = layout.layers(config.num_layers)
    words = layout.columns(config.vocab_size)
    if not (layout.is_first_stage or layout.is_last_stage):
        words = range(0)
    head = EMBEDDING if config.is_tied else HEAD
    splits = _splits_of(config, layout)

    def whole_name(name: str) -> str:
        if name == EMBEDDING and not layout.is_first_stage:
            return head
        if not name.startswith(_LAYERS):
            return name
        index, _, rest = name.removeprefix(_LAYERS).partition(".")
        return f"{_LAYERS}{int(index) + layers.start}.{rest}"

    def read(name: str) -> Tensor:
        name = whole_name(name)
        if name in (EMBEDDING, HEAD):
            return source.part(name, rows=words)
        owner = name.split(".")[-2]
        if owner.endswith("norm"):
            return source.read(name)
        if owner not in splits:
            raise UnusableModel(f"no rule says how ranks share tensor {name!r}; known: {', '.join(sorted(splits))}")
        return splits[owner](source, name)

    return replace(
        source,
        config=replace(
            config,
            num_layers=len(layers),
            num_heads=len(layout.columns(config.num_heads)),
            num_kv_heads=len(layout.kv_heads(config.num_heads, config.num_kv_heads)),
            intermediate_size=len(layout.columns(config.intermediate_size)),
            vocab_size=len(words),
            is_tied=config.is_tied or layout.pp > 1,
            windows=tuple(config.windows[layer] for layer in layers) if config.windows else (),
        ),
        tensor_names=_local_names(source.tensor_names, layers, config.num_layers),
        read=read,
        read_part=None,
    )


_Read = Callable[[ModelSource, str], Tensor]


def _splits_of(config: ModelConfig, layout: Layout) -> dict[str, _Read]:
    """Return how each projection is split, by the last part but one of its name; norms are not, and not here."""
    num_heads, num_kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    queries = _scaled(layout.columns(num_heads), dim)
    keys = _scaled(layout.kv_heads(num_heads, num_kv_heads), dim)
    units = layout.columns(config.intermediate_size)
    fused_keys, fused_values = (_moved(keys, start * dim) for start in (num_heads, num_heads + num_kv_heads))
    return {
        "q_proj": _by_rows(queries),
        "k_proj": _by_rows(keys),
        "v_proj": _by_rows(keys),
        "o_proj": _by_columns(queries),
        "gate_proj": _by_rows(units),
        "up_proj": _by_rows(units),
        "down_proj": _by_columns(units),
        # Files that have several in one matrix, one under another.
        "qkv_proj": _by_rows(queries, fused_keys, fused_values),
        "gate_up_proj": _by_rows(units, _moved(units, config.intermediate_size)),
    }


def _by_rows(*parts: range) -> _Read:
    """Rows of a matrix, or of a bias."""
    return lambda source, name: torch.cat([source.part(name, rows=rows) for rows in parts])


def _by_columns(columns: range) -> _Read:
    return lambda source, name: source.part(name, columns=columns)


def _local_names(names: frozenset[str], layers: range, num_layers: int) -> frozenset[str]:
    """Return the names of a stage's tensors, its layers counted from 0. What belongs to no layer of the model keeps
    its name, so that the check for unexpected tensors names it."""
    local = set()
    for name in names:
        index, _, rest = name.removeprefix(_LAYERS).partition(".")
        if not name.startswith(_LAYERS) or not index.isdecimal() or int(index) >= num_layers:
            local.add(name)
        elif int(index) in layers:
            local.add(f"{_LAYERS}{int(index) - layers.start}.{rest}")
    return frozenset(local)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
