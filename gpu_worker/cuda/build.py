"""From a model on a device to a runner that is ready: the largest iteration, the KV pool, the graphs."""

from array import array
from dataclasses import dataclass, replace

import structlog
import torch

from common.ids import RequestId, Slot
from common.messages.logprobs import MAX_TOP
from common.messages.requests import Sampling
from gpu_worker.attention.base import AttentionBackend, AttentionSpec
from gpu_worker.attention.paged import PagedBatch
from gpu_worker.cuda.device import Device
from gpu_worker.cuda.operations import Operations
from gpu_worker.cuda.pool import GRAPH_RESERVE_BYTES, MemoryFacts, num_blocks
from gpu_worker.cuda.runner import CudaRunner
from gpu_worker.kv_cache import KvCache, bytes_per_token
from gpu_worker.loading import LoadedModel
from gpu_worker.parallel.group import Group
from gpu_worker.slots import Limits, Resident, Row

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What an operator says about the device's memory."""

    memory_share: float
    kv_tokens: int = 0  # 0: as many as fit
    has_graphs: bool = True


def build_runner(
    device: Device,
    model: LoadedModel,
    backend: AttentionBackend[PagedBatch],
    operations: Operations,
    spec: AttentionSpec,
    limits: Limits,
    options: PoolOptions,
    group: Group | None = None,
) -> tuple[CudaRunner, Limits]:
    """Size the KV pool, allocate it, and capture graphs. limits.num_blocks is not looked at.

    Ranks of one group do so together, each with its own shard; limits.vocab_size is the whole model's.

    Returns:
        The runner, and limits with the number of blocks that plans may use, on every rank.

    Raises:
        UnusableModel: If the pool would not hold a request of full length; with the numbers.
    """
    config = model.config
    token_bytes = bytes_per_token(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=spec.dtype,
    )
    reserve_bytes = GRAPH_RESERVE_BYTES if options.has_graphs else 0
    group = group or Group.alone(device.torch_device)
    facts = measure_largest(device, model, backend, operations, spec, limits, group)
    affordable = num_blocks(
        facts,
        memory_share=options.memory_share,
        block_bytes=token_bytes * limits.block_size,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        kv_tokens=options.kv_tokens,
        reserve_bytes=reserve_bytes,
    )
    limits = replace(limits, num_blocks=group.least("num-blocks", affordable))
    runner = new_runner(device, model, backend, operations, spec, limits, group)
    before, _ = device.free_bytes()
    warm_up_s = runner.warm_up(has_graphs=options.has_graphs)
    after, _ = device.free_bytes()
    log.info(
        "device_ready",
        device=device.name,
        kv_tokens=limits.num_blocks * limits.block_size,
        peak_mib=facts.peak_bytes >> 20,
        graphs=len(runner.buckets),
        graphs_mib=(before - after) >> 20,
        warm_up_s=round(warm_up_s, 1),
    )
    return runner, limits


def new_runner(
    device: Device,
    model: LoadedModel,
    backend: AttentionBackend[PagedBatch],
    operations: Operations,
    spec: AttentionSpec,
    limits: Limits,
    group: Group | None = None,
) -> CudaRunner:
    """Return a runner with a KV pool of limits.num_blocks, and one more for what fills up a graph's batch."""
    kv_cache = KvCache.allocate(
        num_layers=model.config.num_layers,
        num_blocks=limits.num_blocks + 1,
        block_size=limits.block_size,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=spec.dtype,
        device=device.torch_device,
    )
    return CudaRunner(device, model, kv_cache, backend, operations, limits, group)


def measure_largest(
    device: Device,
    model: LoadedModel,
    backend: AttentionBackend[PagedBatch],
    operations: Operations,
    spec: AttentionSpec,
    limits: Limits,
    group: Group | None = None,
) -> MemoryFacts:
    """Run the largest iteration on a pool that is just large enough for it, and return what memory it took."""
    rows, blocks = largest_rows(limits)
    device.reset_peak()
    runner = new_runner(device, model, backend, operations, spec, replace(limits, num_blocks=blocks), group)
    runner.run(rows)
    device.synchronize()
    free_bytes, total_bytes = device.free_bytes()
    _, peak_bytes, held_bytes = device.allocated_bytes()
    del runner
    device.reset_peak()
    return MemoryFacts(total_bytes=total_bytes, free_bytes=free_bytes, held_bytes=held_bytes, peak_bytes=peak_bytes)


def largest_rows(limits: Limits) -> tuple[list[Row], int]:
    """Return made-up rows that fill an iteration, and their blocks' number. Every one is sampled with all filters, and
    all of its tokens are scored.

    One decode for each slot but the last, whose chunk takes the rest of the tokens. Chunks are no longer than a
    request may be, so several slots share the rest where one request could not hold it.
    """
    rows: list[Row] = []
    num_left = limits.max_chunk_tokens
    next_block = 0
    for slot in range(limits.max_num_slots):
        num_others = limits.max_num_slots - slot - 1  # each needs a token yet
        num_tokens = max(1, min(num_left - num_others, limits.max_model_len))
        num_left -= num_tokens
        num_row_blocks = -(-num_tokens // limits.block_size)
        resident = Resident(
            slot=Slot(slot),
            request_id=RequestId(f"largest-{slot}"),
            num_prompt_tokens=num_tokens,
            seed=slot,
            sampling=Sampling(
                temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, logprobs=MAX_TOP, prompt_logprobs=MAX_TOP
            ),
            token_ids=array("i", [index % limits.vocab_size for index in range(num_tokens)]),
            block_table=array("i", range(next_block, next_block + num_row_blocks)),
            num_tokens=num_tokens,
        )
        next_block += num_row_blocks
        rows.append(Row(resident, 0, num_tokens, is_sampled=True))
    return rows, next_block


def device_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name; `auto` is bfloat16, which every GPU from Ampere on multiplies natively."""
    dtype: torch.dtype = torch.bfloat16 if name == "auto" else getattr(torch, name)
    return dtype
