"""A rank's part of the model on a device of its own: what gpu_worker.parallel.build does for one on a CPU."""

from dataclasses import dataclass, replace

from common.models import find_model
from gpu_worker.attention import choose_backend, fitted
from gpu_worker.attention.base import AttentionSpec
from gpu_worker.build import dummy_seed_of, open_cuda
from gpu_worker.config import WorkerConfig
from gpu_worker.cuda.build import PoolOptions, build_runner, device_dtype
from gpu_worker.cuda.device import Device
from gpu_worker.cuda.kinds import kind_of
from gpu_worker.cuda.operations import operations_for
from gpu_worker.cuda.staging import Staging
from gpu_worker.loading import load_model, open_model
from gpu_worker.parallel.build import BuiltStage, OnFailed, Part
from gpu_worker.parallel.device_stage import DeviceStage
from gpu_worker.parallel.group import Group
from gpu_worker.parallel.layout import Layout
from gpu_worker.parallel.shard import shard


@dataclass(frozen=True, kw_only=True)
class DevicePart(Part):
    """On a device."""

    has_way_back = True
    device: Device

    def assemble(self, config: WorkerConfig, group: Group, on_failed: OnFailed) -> BuiltStage:
        runner, limits = build_runner(
            self.device,
            self.model,
            self.backend,
            operations_for(self.device.torch_device),
            self.spec,
            self.limits_of(config, num_blocks=0),
            PoolOptions(memory_share=config.gpu_memory_share, kv_tokens=config.kv_tokens, has_graphs=not config.eager),
            group,
        )
        name = self.device.name
        return BuiltStage(
            stage=DeviceStage(self.layout, runner, on_failed),
            limits=limits,
            card=self.card_of(config, limits, device=name, device_kind=kind_of(name)),
        )


def load_onto_cuda(config: WorkerConfig, layout: Layout) -> DevicePart:
    """Load a rank's share of the weights onto the GPU that config names.

    Raises:
        OSError: As gpu_worker.parallel.build.load_part.
    """
    return load_onto(open_cuda(config), config, layout)


def load_onto(device: Device, config: WorkerConfig, layout: Layout) -> DevicePart:
    """Load a rank's share of the weights onto a device.

    Raises:
        OSError: As gpu_worker.parallel.build.load_part.
    """
    files = find_model(config.model)
    whole = open_model(files, dummy_seed=dummy_seed_of(config))
    source = shard(whole, layout)
    if source.dummy_seed is not None:
        source = replace(source, dummy_seed=source.dummy_seed + layout.rank)  # Shards of one shape are drawn apart.
    shape = source.config.served_up_to(config.max_model_len or source.config.max_model_len)
    spec = AttentionSpec.of(
        shape, device=str(device.torch_device), dtype=device_dtype(config.dtype), block_size=config.block_size
    )
    # Before the weights: a refusal should not take minutes.
    backend = choose_backend(config.attention_backend, spec, is_split=config.attention_calls == "split")
    spec = fitted(spec, backend)
    model = load_model(source, spec.dtype, config.max_model_len, device.torch_device, Staging(device).copy)
    return DevicePart(
        layout=layout, name=files.name, whole=whole.config, model=model, backend=backend, spec=spec, device=device
    )
