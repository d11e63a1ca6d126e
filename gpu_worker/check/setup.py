"""The model, the pool and the runners of a check."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from common.cost.shapes import ModelShape
from common.ids import RequestId, Slot
from common.messages.requests import Sampling
from gpu_worker.attention import cuda_backends
from gpu_worker.attention.base import AttentionBackend, AttentionSpec
from gpu_worker.attention.paged import TorchPagedAttention
from gpu_worker.attention.smoke import smoke_test
from gpu_worker.attention.triton import InvariantTritonAttention
from gpu_worker.cuda.build import new_runner
from gpu_worker.cuda.device import CudaDevice, Device, HostDevice
from gpu_worker.cuda.operations import InvariantOperations, Operations, operations_for
from gpu_worker.cuda.runner import CudaRunner
from gpu_worker.kv_cache import bytes_per_token
from gpu_worker.loading import LoadedModel, load_model
from gpu_worker.loading.source import dummy_source
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.llama import Llama
from gpu_worker.models.rope import RopeConfig
from gpu_worker.slots import Limits, Resident, Row

SEED = 11
GREEDY = Sampling(temperature=0.0)
MAX_HOST_DEVICES = 2
ROOM_BYTES = 8 << 30
"""For activations, graphs, and the dense model's wide layers."""
LAYER_SCALE = 0.5
"""What the layers' matrices are multiplied by: with deviations of 0.02 and 4,096 inputs each layer would make more of
the roundings before it, until 6% of the logits are bfloat16's error and hardly a best token is clear."""
HEAD_SCALE = 4.0
"""What the head is multiplied by: with random weights, the best two tokens would else be as good as tied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a check is: the real one, or one that a CPU gets through."""

    config: ModelConfig
    dtype: torch.dtype
    block_size: int
    num_blocks: int
    max_num_slots: int
    max_chunk_tokens: int
    decode_cases: tuple[tuple[int, int], ...]  # rows, context
    bar_case: tuple[int, int]  # the one that the decode bar is about
    prefill_lens: tuple[int, ...]
    prefill_contexts: tuple[int, ...]
    hybrid_chunks: tuple[int, ...]
    hybrid_decodes: tuple[int, int]  # rows, context
    stall_streams: int
    stall_context: int
    stall_prompt: int
    repeats: int


def _mistral(num_layers: int, **other: Any) -> ModelConfig:
    return ModelConfig(num_layers=num_layers, rms_norm_eps=1e-5, is_tied=False, **other)


FULL = Scale(
    config=_mistral(
        32,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope=RopeConfig(theta=1e6),
        max_model_len=32768,
    ),
    dtype=torch.bfloat16,
    block_size=256,  # what every back end takes
    num_blocks=1400,
    max_num_slots=256,
    max_chunk_tokens=8192,
    decode_cases=((1, 1024), (8, 1024), (32, 1024), (32, 4096), (64, 2048), (128, 1024), (256, 1024)),
    bar_case=(32, 4096),
    prefill_lens=(128, 256, 257, 512, 513, 1024, 1025, 2048, 4096, 8192),
    prefill_contexts=(0, 8192),
    hybrid_chunks=(0, 256, 512, 1024, 2048),
    hybrid_decodes=(32, 4096),
    stall_streams=32,
    stall_context=1024,
    stall_prompt=16384,
    repeats=12,
)
TINY = Scale(
    config=_mistral(
        2,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope=RopeConfig(theta=1e4),
        max_model_len=256,
    ),
    dtype=torch.float32,
    block_size=16,
    num_blocks=64,
    max_num_slots=8,
    max_chunk_tokens=64,
    decode_cases=((1, 32), (4, 64)),
    bar_case=(4, 64),
    prefill_lens=(16, 17, 64),
    prefill_contexts=(0, 64),
    hybrid_chunks=(0, 16, 32),
    hybrid_decodes=(4, 48),
    stall_streams=3,
    stall_context=24,
    stall_prompt=150,
    repeats=3,
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A back end that might be checked, or why it is not."""

    backend: AttentionBackend[Any]
    detail: str
    is_available: bool


@dataclass(slots=True)
class Bench:
    """A model on a device, with one KV pool, and runners that share it."""

    device: Device
    scale: Scale
    spec: AttentionSpec
    model: LoadedModel
    limits: Limits
    operations: Operations
    backend: AttentionBackend[Any]
    runner: CudaRunner  # eager until graphs are captured

    @property
    def shape(self) -> ModelShape:
        size = self.scale.dtype.itemsize
        return self.scale.config.for_cost(bytes_per_weight=size, bytes_per_kv=size)

    def runner_of(self, backend: AttentionBackend[Any]) -> CudaRunner:
        """Return another runner, without graphs, on the same pool."""
        return CudaRunner(self.device, self.model, self.runner.kv_cache, backend, self.operations, self.limits)

    def invariant_runner(self, max_num_slots: int) -> CudaRunner:
        """Return one on the same pool whose logits depend on a request alone, without graphs yet."""
        return CudaRunner(
            self.device,
            self.model,
            self.runner.kv_cache,
            InvariantTritonAttention(),
            InvariantOperations(),
            replace(self.limits, max_num_slots=max_num_slots),
        )

    def row(self, slot: int, start: int, num_tokens: int, first_block: int, *, seed: int | None = None) -> Row:
        """Return a sampled row of a made-up request whose blocks lie one after another from first_block on."""
        end = start + num_tokens
        tokens = random_tokens(end, self.scale.config.vocab_size, slot if seed is None else seed)
        num_blocks = -(-end // self.limits.block_size)
        assert first_block + num_blocks <= self.limits.num_blocks, "the check's pool is too small for this case"
        return Row(
            resident_of(slot, tokens, range(first_block, first_block + num_blocks)), start, num_tokens, is_sampled=True
        )

    def decodes(self, num_rows: int, context: int) -> list[Row]:
        """Return decodes that look back on context tokens each, their own included. Blocks are shared if need be."""
        blocks_each = -(-context // self.limits.block_size)
        places = self.limits.num_blocks // blocks_each
        return [self.row(slot, context - 1, 1, slot % places * blocks_each) for slot in range(num_rows)]


def open_device(kind: str, index: int = 0) -> Device:
    """Return the device to check; of several CUDA devices make one the calling thread's."""
    return CudaDevice(index) if kind == "cuda" else HostDevice()


def num_devices(kind: str) -> int:
    """Return how many devices of a kind can be opened."""
    return torch.cuda.device_count() if kind == "cuda" else MAX_HOST_DEVICES


def spec_of(scale: Scale, device: Device) -> AttentionSpec:
    """Return what the model asks of a back end."""
    return AttentionSpec.of(
        scale.config, device=str(device.torch_device), dtype=scale.dtype, block_size=scale.block_size
    )


def candidates(spec: AttentionSpec, *, is_split: bool = True) -> list[Candidate]:
    """Return every back end for devices, with what its probe and its first batch say."""
    found = []
    for backend in cuda_backends(is_split=is_split):
        probe = backend.probe(spec)
        problem = smoke_test(backend, spec) if probe.is_available else probe.detail
        found.append(Candidate(backend, problem or probe.detail, problem is None))
    return found


def preferred(found: Sequence[Candidate], device: Device) -> AttentionBackend[Any]:
    """Return the first that serves; on the host the plain one, which is faster there than an interpreted one."""
    if device.torch_device.type == "cpu":
        return TorchPagedAttention()
    return next(candidate.backend for candidate in found if candidate.is_available)


def bytes_needed(scale: Scale) -> int:
    """Return the device memory that a check of this scale takes: weights, pool, and room for its largest chunks."""
    config, size = scale.config, scale.dtype.itemsize
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * config.head_dim * (heads + config.num_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = size * (config.num_layers * layer + 2 * config.vocab_size * config.hidden_size)
    token = bytes_per_token(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=scale.dtype,
    )
    return weights + (scale.num_blocks + 1) * scale.block_size * token + ROOM_BYTES


def build_bench(device: Device, scale: Scale, backend: AttentionBackend[Any]) -> Bench:
    """Draw a model's weights on the device, and fill a pool with random keys and values."""
    source = dummy_source(Llama(), scale.config, (), SEED)
    model = load_model(source, scale.dtype, device=device.torch_device)
    for layer in model.weights.layers:
        for matrix in (layer.query_key_value, layer.attention_output, layer.gate_up, layer.down):
            matrix.mul_(LAYER_SCALE)
    model.weights.head.mul_(HEAD_SCALE)
    spec = spec_of(scale, device)
    limits = Limits(
        vocab_size=scale.config.vocab_size,
        max_model_len=scale.config.max_model_len,
        block_size=scale.block_size,
        num_blocks=scale.num_blocks,
        max_num_slots=scale.max_num_slots,
        max_chunk_tokens=scale.max_chunk_tokens,
    )
    operations = operations_for(device.torch_device)
    runner = new_runner(device, model, backend, operations, spec, limits)
    # Zeros run faster than what a cache holds: a GPU's clock follows its power, and its power the bits that flip.
    for pool in (*runner.kv_cache.keys, *runner.kv_cache.values):
        pool.normal_()
    return Bench(device, scale, spec, model, limits, operations, backend, runner)


def resident_of(slot: int, tokens: Sequence[int], blocks: Sequence[int], sampling: Sampling = GREEDY) -> Resident:
    """Return a made-up request."""
    return Resident(
        slot=Slot(slot),
        request_id=RequestId(f"check-{slot}"),
        num_prompt_tokens=len(tokens),
        seed=0,
        sampling=sampling,
        token_ids=array("i", tokens),
        block_table=array("i", blocks),
        num_tokens=len(tokens),
    )


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    return Random(seed).choices(range(vocab_size), k=count)
