"""From options to a runner and the card that describes it: everything that is decided once, at start-up."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
import torch

from common.messages.cards import ModelCard, WorkerCard
from common.models import ModelFiles, find_model
from gpu_worker.attention import choose_backend, fitted
from gpu_worker.attention.base import AttentionSpec
from gpu_worker.attention.native import NativeAttention
from gpu_worker.config import WorkerConfig
from gpu_worker.cuda.kinds import kind_of
from gpu_worker.cuda.runner import CudaRunner
from gpu_worker.errors import BackendUnavailable, UnusableModel
from gpu_worker.forward import make_forward
from gpu_worker.kernels.library import WeightType, find_kernels
from gpu_worker.kv_cache import bytes_per_token
from gpu_worker.loading import LoadedModel, load_model, open_model
from gpu_worker.memory import give_back_freed, take_pages_of
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families import unlike_llama
from gpu_worker.processor import Processor
from gpu_worker.runner import Runner
from gpu_worker.slots import DEFAULT_BLOCK_SIZE, Limits
from gpu_worker.threads import num_usable_cores

if TYPE_CHECKING:
    from gpu_worker.cuda.device import CudaDevice

log = structlog.get_logger()

DEFAULT_NUM_FULL_REQUESTS = 3
"""Requests of full length that the KV pool holds unless --kv-tokens says otherwise."""
DUMMY_SEED = 0
"""Of weights that are drawn at random: the same for every worker, so that one's streams can go on at another."""
MAX_MEMORY_SHARE = 0.5
"""Of the memory that is free once the weights are loaded, what a KV pool without --kv-tokens may take."""


@dataclass(frozen=True, slots=True)
class Built:
    """A worker that can run iterations. The card's profile is still empty."""

    runner: Runner | CudaRunner
    limits: Limits
    card: WorkerCard


def build(config: WorkerConfig) -> Built:
    """Load the model and lay out the KV pool. Takes seconds; call it in the thread that will run iterations.

    Raises:
        OSError: If the model cannot be found or served, or the attention back end is unavailable; with the reason.
    """
    torch.set_num_threads(config.threads or num_usable_cores())
    files = find_model(config.model)
    if config.device == "cuda":
        return _build_cuda(config, files)
    source = open_model(files, dummy_seed=dummy_seed_of(config))
    block_size = config.block_size or DEFAULT_BLOCK_SIZE
    shape = source.config.served_up_to(config.max_model_len or source.config.max_model_len)
    difference = unlike_llama(source.family, shape)
    may_be_native = config.attention_backend in ("auto", NativeAttention.name) and not difference
    kernels = find_kernels(config.kernels) if may_be_native else None
    dtype = choose_dtype(config.dtype, has_kernels=kernels is not None)
    spec = AttentionSpec.of(
        shape, device=config.device, dtype=dtype, block_size=block_size, kernels=kernels, unlike_llama=difference
    )
    backend = choose_backend(config.attention_backend, spec)  # Before the weights: a refusal should not take a minute.
    if config.deterministic and not backend.is_batch_invariant:
        raise BackendUnavailable(f"--deterministic needs the attention back end native; this would be {backend.name}")
    if config.weights != "dtype" and backend.name != NativeAttention.name:
        raise BackendUnavailable(
            f"--weights {config.weights} needs the attention back end native; this would be {backend.name}"
        )
    model = load_model(source, dtype, config.max_model_len)
    num_blocks = num_kv_blocks(config, shape, model.max_model_len, dtype, block_size)
    limits = Limits(
        vocab_size=shape.vocab_size,
        max_model_len=model.max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_slots=config.max_num_slots,
        max_chunk_tokens=config.max_chunk_tokens,
    )
    card = card_of(
        config,
        files.name,
        model,
        limits,
        dtype,
        device=cpu_name(kernels.instruction_set if backend.name == NativeAttention.name and kernels else "torch"),
        device_kind="cpu",
        bytes_per_weight=1 if config.weights == "int8" else dtype.itemsize,
        attention=backend.name,
        # With native attention all products are our own kernels'; with any other they are torch's, which sum in another
        # order for another number of rows, and none of those back ends claims to be invariant.
        is_batch_invariant=backend.is_batch_invariant,
    )
    weight_type = WeightType.INT8 if config.weights == "int8" else None
    eos_token_ids = model.eos_token_ids
    forward, kv_cache = make_forward(model, backend, spec, limits, weight_type=weight_type)
    del model
    give_back_freed()
    take_pages_of((*kv_cache.keys, *kv_cache.values))
    return Built(Runner(forward, kv_cache, eos_token_ids, limits.max_num_slots), limits, card)


def _build_cuda(config: WorkerConfig, files: ModelFiles) -> Built:
    """Load the model onto a GPU, and size its KV pool by what is left.

    Raises:
        OSError: As build.
    """
    # Here, not above: nothing of it is needed on a CPU.
    from gpu_worker.cuda.build import PoolOptions, build_runner, device_dtype  # noqa: PLC0415
    from gpu_worker.cuda.operations import InvariantOperations, TritonOperations  # noqa: PLC0415
    from gpu_worker.cuda.staging import Staging  # noqa: PLC0415

    if config.weights != "dtype":
        raise BackendUnavailable(f"--weights {config.weights} is for CPUs so far: it needs the native kernels")
    source = open_model(files, dummy_seed=dummy_seed_of(config))
    shape = source.config.served_up_to(config.max_model_len or source.config.max_model_len)
    if config.deterministic and (difference := unlike_llama(source.family, shape)):
        raise BackendUnavailable(f"--deterministic on CUDA is for layers like Llama's; this model has {difference}")
    device = open_cuda(config)
    dtype = device_dtype(config.dtype)
    spec = AttentionSpec.of(shape, device=str(device.torch_device), dtype=dtype, block_size=config.block_size)
    # Before the weights: a refusal should not take minutes.
    backend = choose_backend(
        config.attention_backend,
        spec,
        is_split=config.attention_calls == "split",
        must_be_invariant=config.deterministic,
    )
    spec = fitted(spec, backend)
    model = load_model(source, dtype, config.max_model_len, device.torch_device, Staging(device).copy)
    runner, limits = build_runner(
        device,
        model,
        backend,
        InvariantOperations() if config.deterministic else TritonOperations(),
        spec,
        Limits(
            vocab_size=shape.vocab_size,
            max_model_len=model.max_model_len,
            block_size=spec.block_size,
            num_blocks=0,
            max_num_slots=config.max_num_slots,
            max_chunk_tokens=config.max_chunk_tokens,
        ),
        PoolOptions(memory_share=config.gpu_memory_share, kv_tokens=config.kv_tokens, has_graphs=not config.eager),
    )
    card = card_of(
        config,
        files.name,
        model,
        limits,
        dtype,
        device=device.name,
        device_kind=kind_of(device.name),
        bytes_per_weight=dtype.itemsize,
        attention=backend.name,
        is_batch_invariant=backend.is_batch_invariant,
    )
    return Built(runner, limits, card)


def open_cuda(config: WorkerConfig) -> "CudaDevice":
    """Make the CUDA device that config names this thread's current one, and return it.

    Raises:
        BackendUnavailable: If there is none.
    """
    from gpu_worker.cuda.device import CudaDevice  # noqa: PLC0415  # As above.

    if not torch.cuda.is_available() or config.device_index >= torch.cuda.device_count():
        raise BackendUnavailable(
            f"--device cuda: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices, "
            f"--device-index is {config.device_index}"
        )
    return CudaDevice(config.device_index)


def card_of(
    config: WorkerConfig,
    name: str,
    model: LoadedModel,
    limits: Limits,
    dtype: torch.dtype,
    *,
    device: str,
    device_kind: str,
    bytes_per_weight: int,
    attention: str,
    is_batch_invariant: bool,
) -> WorkerCard:
    """Return what a worker says of itself, its profile still empty. The model is the whole one, whoever holds it."""
    shape = model.config
    return WorkerCard(
        model=ModelCard(
            name=config.served_model_name or name,
            max_model_len=model.max_model_len,
            vocab_size=shape.vocab_size,
            eos_token_ids=model.eos_token_ids,
            has_penalties=True,
            has_logprobs=True,
        ),
        shape=shape.for_cost(bytes_per_weight=bytes_per_weight, bytes_per_kv=dtype.itemsize),
        device=device,
        device_kind=device_kind,
        tensor_parallel=config.tp,
        pipeline_parallel=config.pp,
        dtype=name_of(dtype),
        attention=attention,
        is_batch_invariant=is_batch_invariant,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        max_num_slots=limits.max_num_slots,
        max_chunk_tokens=limits.max_chunk_tokens,
    )


def cpu_name(computed_by: str) -> str:
    """Return what a CPU is to a fit of the cost model: its model, and what of it is used."""
    return f"cpu {Processor.read().model}, {computed_by}, {torch.get_num_threads()} threads"


def dummy_seed_of(config: WorkerConfig) -> int | None:
    """Return the seed that weights are drawn by; None if they are read."""
    return DUMMY_SEED if config.load_format == "dummy" else None


def choose_dtype(name: str, *, has_kernels: bool = False) -> torch.dtype:
    """Return the dtype of that name; for `auto`, bfloat16 where that is fast.

    Our own kernels widen it on the way to the registers, so that it halves what a decode reads. Torch needs a CPU that
    multiplies it: its emulation is slower than float32.
    """
    if name != "auto":
        named: torch.dtype = getattr(torch, name)
        return named
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    native = [feature for feature in ("amx_bf16", "avx512_bf16", "bf16") if capabilities.get(feature)]
    dtype = torch.bfloat16 if native or has_kernels else torch.float32
    log.info("dtype_chosen", name=name_of(dtype), native_bfloat16=native, has_kernels=has_kernels)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def num_kv_blocks(
    config: WorkerConfig,
    shape: ModelConfig,
    max_model_len: int,
    dtype: torch.dtype,
    block_size: int,
    num_sharing: int = 1,
) -> int:
    """Return the number of blocks of the KV pool. num_sharing processes each have one in the same memory.

    Raises:
        UnusableModel: If a pool of the default size would not hold a single block.
    """
    if config.kv_tokens:
        return config.kv_tokens // block_size
    token_bytes = bytes_per_token(
        num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=dtype
    )
    affordable = int(_free_memory_bytes() * MAX_MEMORY_SHARE) // num_sharing // token_bytes
    num_tokens = min(DEFAULT_NUM_FULL_REQUESTS * max_model_len, affordable)
    if num_tokens < block_size:
        raise UnusableModel(f"memory for {affordable} tokens of KV is left, less than one block; try --kv-tokens")
    return num_tokens // block_size


def _free_memory_bytes() -> int:
    """Return the memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # Not Linux.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
