"""Are the kernels right? Every back end, and the fused passes, against plain float32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionBackend, AttentionSpec, BatchLayout, bind
from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.check.setup import candidates
from gpu_worker.cuda.device import Device
from gpu_worker.cuda.operations import TorchOperations, operations_for
from gpu_worker.models.rope import RopeConfig, rotation_table

MAX_ERROR = {torch.bfloat16: 1e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Relative, of the whole batch's length. bfloat16 is expected at 2e-3 to 4e-3."""

DECODES = ((1, 1), (1, 70), (1, 300), (1, 1000))
CHUNKS = ((40, 90), (19, 19), (129, 400))
BATCHES = {"decodes": DECODES, "chunks": CHUNKS, "hybrid": DECODES + CHUNKS, "empty rows": ((1, 9), (0, 30), (5, 64))}
TINY_BATCHES = ("hybrid", "empty rows")
SHAPES = ((1, 128), (4, 128), (8, 128), (3, 64), (4, 64))
"""(group, head_dim)."""
BLOCK_SIZES = (16, 128, 256)


def check_attention(
    device: Device, dtype: torch.dtype, *, is_tiny: bool, is_over: Callable[[], bool]
) -> dict[str, Any]:
    """Compare each back end that serves with the reference, on shuffled blocks among poisoned ones.

    Returns:
        By back end: its cases, its greatest error, and cases that are wrong; or why it was skipped.
    """
    results: dict[str, Any] = {}
    shapes = SHAPES[3:4] if is_tiny else SHAPES
    for block_size in BLOCK_SIZES[:1] if is_tiny else BLOCK_SIZES:
        for group, head_dim in shapes:
            spec = AttentionSpec(
                device=str(device.torch_device),
                dtype=dtype,
                num_heads=2 * group,
                num_kv_heads=2,
                head_dim=head_dim,
                block_size=block_size,
            )
            for is_split in (True, False):
                for candidate in candidates(spec, is_split=is_split):
                    result = results.setdefault(candidate.backend.name, {"cases": 0, "worst": 0.0, "wrong": []})
                    if not candidate.is_available:
                        result["skipped"] = candidate.detail
                        continue
                    for name in TINY_BATCHES if is_tiny else BATCHES:
                        rows = BATCHES[name]
                        if is_over():
                            result["cut_short"] = True
                            return results
                        error = attention_error(candidate.backend, spec, _fewer(rows) if is_tiny else rows)
                        result["cases"] += 1
                        result["worst"] = max(result["worst"], error)
                        if not error < MAX_ERROR[dtype]:
                            calls = "split" if is_split else "one"
                            result["wrong"].append(f"{name} {group}x{head_dim} block {block_size} {calls}: {error:.2e}")
    return results


def attention_error(
    backend: AttentionBackend[Any], spec: AttentionSpec, rows: tuple[tuple[int, int], ...], seed: int = 0
) -> float:
    """Return a back end's relative error on (query_len, kv_len) rows. Unused blocks are NaN; used ones end in 1e4."""
    generator = torch.Generator().manual_seed(seed)
    nums_blocks = [-(-kv_len // spec.block_size) for _, kv_len in rows]
    order = torch.randperm(sum(nums_blocks) + 3, generator=generator)
    shape = (len(order), spec.block_size, spec.num_kv_heads, spec.head_dim)
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    tables = torch.zeros(len(rows), max(nums_blocks), dtype=torch.int64)
    num_used = 0
    for row, (count, (_, kv_len)) in enumerate(zip(nums_blocks, rows, strict=True)):
        blocks = order[num_used : num_used + count]
        num_used += count
        tables[row, :count], tables[row, count:] = blocks, blocks[-1]
        for pool in (keys, values):
            pool[blocks] = torch.randn(count, *shape[1:], generator=generator)
            pool[blocks[-1], kv_len - (count - 1) * spec.block_size :] = 1e4
    queries = torch.randn(sum(row[0] for row in rows), spec.num_heads, spec.head_dim, generator=generator)
    tensors = [tensor.to(device=spec.device, dtype=spec.dtype) for tensor in (queries, keys, values)]
    layout = BatchLayout(
        query_lens=tuple(row[0] for row in rows),
        kv_lens=tuple(row[1] for row in rows),
        block_tables=tables.to(spec.device),
    )
    wide = [tensor.float() for tensor in tensors]
    expected = bind(ReferenceAttention(), layout, replace(spec, dtype=torch.float32))(*wide)
    return relative_error(bind(backend, layout, spec)(*tensors), expected)


def check_operations(device: Device, dtype: torch.dtype) -> dict[str, float]:
    """Return the relative error of each fused pass against its plain twin in float32; NaN if one wrote elsewhere."""
    fused, plain = operations_for(device.torch_device), TorchOperations()
    num_heads, num_kv_heads, head_dim, tokens, width = 8, 2, 128, 37, 1536
    cosine, sine = (
        table.to(device.torch_device) for table in rotation_table(RopeConfig(theta=1e4), head_dim, 512, torch.float32)
    )
    projected = _random(device, tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    slots = torch.randperm(8 * 16, generator=torch.Generator().manual_seed(3))[:tokens].to(device.torch_device)
    positions = torch.arange(tokens, device=device.torch_device) * 13
    pools = [
        [torch.full((8, 16, num_kv_heads, head_dim), 7.0, dtype=kind, device=device.torch_device) for _ in range(2)]
        for kind in (dtype, torch.float32)
    ]
    queries = [
        operations.rotate_and_store(
            projected.to(kind),
            positions=positions,
            slots=slots,
            cosine=cosine.to(kind),
            sine=sine.to(kind),
            keys=keys,
            values=values,
            num_heads=num_heads,
        )
        for operations, kind, (keys, values) in zip((fused, plain), (dtype, torch.float32), pools, strict=True)
    ]
    errors = {"rotate": relative_error(queries[0], queries[1])}
    untouched = torch.ones(8 * 16, dtype=torch.bool)
    untouched[slots.cpu()] = False
    for name, mine, twin in zip(("store keys", "store values"), *pools, strict=True):
        is_clean = bool((mine.flatten(0, 1)[untouched.to(mine.device)] == 7.0).all())
        errors[name] = relative_error(mine, twin) if is_clean else float("nan")
    residual, added, weight = (_random(device, *shape) for shape in ((tokens, width), (tokens, width), (width,)))
    normed = [
        operations.add_and_norm(residual.to(kind).clone(), added.to(kind), weight.to(kind), 1e-5)
        for operations, kind in ((fused, dtype), (plain, torch.float32))
    ]
    errors["add and norm"] = relative_error(*normed)
    gate_up = _random(device, tokens, 2 * width)
    errors["silu and multiply"] = relative_error(
        fused.silu_and_multiply(gate_up.to(dtype)), plain.silu_and_multiply(gate_up)
    )
    return errors


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the length of the difference by the length of what was expected; NaN if a value is."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def _random(device: Device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device.torch_device)


def _fewer(rows: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Rows that an interpreter gets through: no longer than 90."""
    return tuple((min(query_len, 20), min(kv_len, 90)) for query_len, kv_len in rows)
