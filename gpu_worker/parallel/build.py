"""A rank's part of the model, from options to something that runs: what gpu_worker.build does for a whole one.

In three steps, because ranks meet in between: each loads its shard, all meet, and then they agree on the size of the KV
pool and put themselves together.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from common.messages.cards import WorkerCard
from common.models import find_model
from common.wire.names import leaves_loopback
from gpu_worker.attention import choose_backend
from gpu_worker.attention.base import AttentionBackend, AttentionSpec
from gpu_worker.build import card_of, choose_dtype, cpu_name, name_of, num_kv_blocks
from gpu_worker.config import WorkerConfig
from gpu_worker.kv_cache import KvCache
from gpu_worker.loading import LoadedModel, load_model, open_model
from gpu_worker.memory import take_pages_of
from gpu_worker.models.config import ModelConfig
from gpu_worker.parallel.forward import StageForward
from gpu_worker.parallel.group import Group
from gpu_worker.parallel.layout import Layout
from gpu_worker.parallel.meeting import address_towards
from gpu_worker.parallel.shard import shard
from gpu_worker.parallel.stage import HostStage, Stage
from gpu_worker.slots import DEFAULT_BLOCK_SIZE, Limits
from gpu_worker.threads import num_usable_cores

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

OnFailed = Callable[[BaseException], None]
"""Takes what has ended a thread of a stage's own; called in that thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A rank that can run its part of iterations. The card's profile is still empty."""

    stage: Stage
    limits: Limits
    card: WorkerCard


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """A rank's share of the weights, loaded."""

    has_way_back: ClassVar[bool] = False
    """Whether drawn tokens come back to the first stage from device to device; else by the links."""

    layout: Layout
    name: str  # of the model
    whole: ModelConfig
    model: LoadedModel  # of the rank's shard
    backend: AttentionBackend[Any]
    spec: AttentionSpec

    def settings(self, config: WorkerConfig) -> str:
        """What all ranks must have in common, in words."""
        shape = self.whole
        return (
            f"tp {config.tp}, pp {config.pp}, {self.name} of {shape.num_layers} layers, {shape.num_heads} heads and "
            f"{shape.vocab_size} words in {name_of(self.spec.dtype)}, attention {self.backend.name}, "
            f"max_model_len {self.model.max_model_len}, block_size {self.spec.block_size}, "
            f"max_num_slots {config.max_num_slots}, max_chunk_tokens {config.max_chunk_tokens}"
        )

    def meet(self, store: "Store", config: WorkerConfig) -> Group:
        """Meet the other ranks in a store that all share."""
        assert config.rank_address is not None, "checked with the options, or chosen"
        host = address_towards(config.rank_address)
        return Group(store, self.layout, self.spec.device, config.rank_timeout_s, host, has_way_back=self.has_way_back)

    @abstractmethod
    def assemble(self, config: WorkerConfig, group: Group, on_failed: OnFailed) -> BuiltStage:
        """Agree on the KV pool with the ranks of group, lay it out, and put a rank together.

        Raises:
            UnusableModel: If there is no room for it.
        """

    def limits_of(self, config: WorkerConfig, num_blocks: int) -> Limits:
        return Limits(
            vocab_size=self.whole.vocab_size,
            max_model_len=self.model.max_model_len,
            block_size=self.spec.block_size,
            num_blocks=num_blocks,
            max_num_slots=config.max_num_slots,
            max_chunk_tokens=config.max_chunk_tokens,
        )

    def card_of(self, config: WorkerConfig, limits: Limits, *, device: str, device_kind: str) -> WorkerCard:
        return card_of(
            config,
            self.name,
            replace(self.model, config=self.whole),
            limits,
            self.spec.dtype,
            device=device,
            device_kind=device_kind,
            bytes_per_weight=self.spec.dtype.itemsize,
            attention=self.backend.name,
            is_batch_invariant=False,  # Sums over ranks are in an order of their own.
        )


@dataclass(frozen=True, kw_only=True)
class HostPart(Part):
    """In host memory, for a rank on a CPU."""

    num_blocks: int  # KV blocks that there is memory for

    def assemble(self, config: WorkerConfig, group: Group, on_failed: OnFailed) -> BuiltStage:
        model, spec = self.model, self.spec
        limits = self.limits_of(config, group.least("num-blocks", self.num_blocks))
        kv_cache = KvCache.allocate(
            num_layers=model.config.num_layers,
            num_blocks=limits.num_blocks,
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.dtype,
        )
        take_pages_of((*kv_cache.keys, *kv_cache.values))
        forward = StageForward(group, model, kv_cache, self.backend, spec, self.whole.vocab_size)
        return BuiltStage(
            stage=HostStage(
                self.layout, forward, kv_cache, model.eos_token_ids, limits.max_num_slots, config.rank_timeout_s
            ),
            limits=limits,
            card=self.card_of(config, limits, device=cpu_name("torch"), device_kind="cpu"),
        )


def load_part(config: WorkerConfig, layout: Layout) -> Part:
    """Load a rank's share of the weights, onto the device that config names. Takes seconds.

    Raises:
        OSError: If the model cannot be found or served, or the attention back end is unavailable; with the reason.
    """
    if config.device == "cuda":
        from gpu_worker.parallel.device_build import load_onto_cuda  # noqa: PLC0415  # Nothing of it is needed on a CPU.

        return load_onto_cuda(config, layout)
    assert config.rank_address is not None, "checked with the options, or chosen"
    num_sharing = 1 if leaves_loopback(config.rank_address) else layout.num_ranks
    torch.set_num_threads(config.threads or max(1, num_usable_cores() // num_sharing))
    files = find_model(config.model)
    whole = open_model(files)
    source = shard(whole, layout)
    dtype = choose_dtype(config.dtype)
    spec = AttentionSpec.of(
        source.config, device="cpu", dtype=dtype, block_size=config.block_size or DEFAULT_BLOCK_SIZE
    )
    backend = choose_backend(config.attention_backend, spec)
    model = load_model(source, dtype, config.max_model_len)
    return HostPart(
        layout=layout,
        name=files.name,
        whole=whole.config,
        model=model,
        backend=backend,
        spec=spec,
        num_blocks=num_kv_blocks(config, source.config, model.max_model_len, dtype, spec.block_size, num_sharing),
    )
