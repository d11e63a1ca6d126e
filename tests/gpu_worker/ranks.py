"""Several ranks in one process: a thread each, and gloo between them, as between processes."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from common.models import find_model
from gpu_worker.attention import choose_backend
from gpu_worker.attention.base import AttentionSpec
from gpu_worker.kv_cache import KvCache
from gpu_worker.loading import LoadedModel, load_model, open_model
from gpu_worker.parallel.collectives import c10d
from gpu_worker.parallel.forward import StageForward
from gpu_worker.parallel.group import Group
from gpu_worker.parallel.layout import Layout
from gpu_worker.parallel.shard import shard
from gpu_worker.slots import Limits

JOIN_TIMEOUT_S = 60.0
T = TypeVar("T")


def in_ranks(tp: int, pp: int, run: Callable[[Layout, Group], T], *, do_stay: bool = True) -> list[T]:
    """Run as every rank at a time; return what each returned. With do_stay a rank that is through stays connected.

    Raises:
        BaseException: What the first of them has raised.
    """
    store = c10d.HashStore()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    staying: list[Group] = []

    def main(rank: int) -> None:
        layout = Layout(tp=tp, pp=pp, rank=rank)
        try:
            group = Group(store, layout, "cpu", JOIN_TIMEOUT_S, has_way_back=True)
            if do_stay:
                staying.append(group)
            results[rank] = run(layout, group)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(tp * pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_TIMEOUT_S)
        assert errors or not thread.is_alive(), "a rank hangs"
    for error in errors.values():
        raise error  # The first: others follow from it.
    return [results[rank] for rank in range(tp * pp)]


def load_shard(path: Path, layout: Layout) -> LoadedModel:
    """Load a rank's part of a model, in float32."""
    return load_model(shard(open_model(find_model(str(path))), layout), torch.float32)


def stage_forward(path: Path, group: Group, limits: Limits) -> tuple[StageForward, KvCache, Any]:
    """Return a rank's forward pass, its KV cache, and its part of the model."""
    model = load_shard(path, group.layout)
    config = model.config
    spec = AttentionSpec(
        device="cpu",
        dtype=torch.float32,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=limits.block_size,
        scale=config.attention_scale,
    )
    kv_cache = KvCache.allocate(
        num_layers=config.num_layers,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
    )
    backend = choose_backend("cpu", spec)
    return StageForward(group, model, kv_cache, backend, spec, limits.vocab_size), kv_cache, model
