"""A rank's part of the model, from options to something that runs: what gpu_worker.build does for a whole one.

In two steps, because the size of the KV pool is agreed on between them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from common.messages.cards import WorkerCard
from common.models import find_model
from common.wire.names import leaves_loopback
from gpu_worker.attention import choose_backend
from gpu_worker.attention.base import AttentionBackend, AttentionSpec
from gpu_worker.build import card_of, choose_dtype, name_of, num_kv_blocks
from gpu_worker.config import WorkerConfig
from gpu_worker.kv_cache import KvCache
from gpu_worker.loading import LoadedModel, load_model, open_model
from gpu_worker.memory import take_pages_of
from gpu_worker.models.config import ModelConfig
from gpu_worker.parallel.forward import StageForward
from gpu_worker.parallel.group import Group
from gpu_worker.parallel.layout import Layout
from gpu_worker.parallel.shard import shard
from gpu_worker.parallel.stage import Stage
from gpu_worker.slots import DEFAULT_BLOCK_SIZE, Limits
from gpu_worker.threads import num_usable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's share of the weights, loaded."""

    name: str  # of the model
    whole: ModelConfig
    model: LoadedModel  # of the rank's shard
    backend: AttentionBackend[Any]
    spec: AttentionSpec
    num_blocks: int  # KV blocks that there is memory for

    def settings(self, config: WorkerConfig) -> str:
        """What all ranks must have in common, in words."""
        shape = self.whole
        return (
            f"tp {config.tp}, pp {config.pp}, {self.name} of {shape.num_layers} layers, {shape.num_heads} heads and "
            f"{shape.vocab_size} words in {name_of(self.spec.dtype)}, attention {self.backend.name}, "
            f"max_model_len {self.model.max_model_len}, block_size {self.spec.block_size}, "
            f"max_num_slots {config.max_num_slots}, max_chunk_tokens {config.max_chunk_tokens}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A rank that can run its part of iterations. The card's profile is still empty."""

    stage: Stage
    limits: Limits
    card: WorkerCard


def load_part(config: WorkerConfig, layout: Layout) -> Part:
    """Load a rank's share of the weights. Takes seconds.

    Raises:
        OSError: If the model cannot be found or served, or the attention back end is unavailable; with the reason.
    """
    assert config.rank_address is not None, "checked with the options, or chosen"
    num_sharing = 1 if leaves_loopback(config.rank_address) else layout.num_ranks
    torch.set_num_threads(config.threads or max(1, num_usable_cores() // num_sharing))
    files = find_model(config.model)
    whole = open_model(files)
    source = shard(whole, layout)
    dtype = choose_dtype(config.dtype)
    spec = AttentionSpec.of(
        source.config, device=config.device, dtype=dtype, block_size=config.block_size or DEFAULT_BLOCK_SIZE
    )
    backend = choose_backend(config.attention_backend, spec)
    model = load_model(source, dtype, config.max_model_len)
    return Part(
        name=files.name,
        whole=whole.config,
        model=model,
        backend=backend,
        spec=spec,
        num_blocks=num_kv_blocks(config, source.config, model.max_model_len, dtype, spec.block_size, num_sharing),
    )


def assemble(config: WorkerConfig, layout: Layout, part: Part, num_blocks: int, group: Group) -> BuiltStage:
    """Lay out the KV pool, and put a rank together."""
    model, spec = part.model, part.spec
    limits = Limits(
        vocab_size=part.whole.vocab_size,
        max_model_len=model.max_model_len,
        block_size=spec.block_size,
        num_blocks=num_blocks,
        max_num_slots=config.max_num_slots,
        max_chunk_tokens=config.max_chunk_tokens,
    )
    kv_cache = KvCache.allocate(
        num_layers=model.config.num_layers,
        num_blocks=num_blocks,
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
    )
    if config.device == "cpu":
        take_pages_of((*kv_cache.keys, *kv_cache.values))
    forward = StageForward(layout, group, model, kv_cache, part.backend, spec, part.whole.vocab_size)
    card = card_of(
        config,
        part.name,
        replace(model, config=part.whole),
        limits,
        spec.dtype,
        device=config.device,
        device_kind="cpu",
        bytes_per_weight=spec.dtype.itemsize,
        attention=part.backend.name,
        is_batch_invariant=part.backend.is_batch_invariant,
    )
    return BuiltStage(
        stage=Stage(layout, forward, kv_cache, model.eos_token_ids, limits.max_num_slots), limits=limits, card=card
    )
