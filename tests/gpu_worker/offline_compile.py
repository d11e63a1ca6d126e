"""Compiles our Triton kernels for GPUs that are not here, and prints what each takes: one JSON line a variant.

A program of its own, because Triton decides when a kernel is defined whether it will be interpreted:

    env -u TRITON_INTERPRET python -m tests.gpu_worker.offline_compile
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu_worker.triton_kernels import kernels_attention, kernels_elementwise, kernels_invariant
from gpu_worker.triton_kernels.tiles import (
    SPLIT_KEYS,
    chunk_tiles,
    decode_tiles,
    invariant_tiles,
    padded_group,
    product_tiles,
)

CAPABILITIES = (80, 90)
SHAPES = ((4, 128), (3, 64))
"""(group, head_dim) of Mistral and Llama 3, and of SmolLM2. Registers follow from the head size, so the smaller one is
compiled for one device only."""
MODULES = (kernels_attention, kernels_elementwise, kernels_invariant)
TOLD = ("GROUP", "HEAD_DIM", "WINDOW", "NUM_SPLITS", "TILE_OUTPUTS")
"""Constants that tell one variant from another."""
POINTERS = {
    "query_starts": "*i32",
    "kv_lens": "*i32",
    "block_tables": "*i32",
    "partial_means": "*fp32",
    **dict.fromkeys(("means", "totals", "joined_means", "joined_totals"), "*fp32"),
    "partial_totals": "*fp32",
    "positions": "*i64",
    "slots": "*i64",
}
"""All others point to bfloat16."""
SIZES = ("width", "num_inputs", "num_outputs")
"""Of a model: multiples of 16, as strides are."""
SCALARS = {"scale_log2": "fp32", "eps": "fp32"}
"""All others that are no pointers are int32."""


def main() -> None:
    for capability in CAPABILITIES:
        for group, head_dim in SHAPES if capability == CAPABILITIES[0] else SHAPES[:1]:
            report(capability, "attend_tiles", *tiles_variant(group, head_dim, window=0))
            report(capability, "attend_splits", *splits_variant(group, head_dim, num_splits=8))
        report(capability, "attend_tiles", *tiles_variant(4, 128, window=4096))
        report(capability, "attend_tiles", *tiles_variant(2, 256, window=512))
        report(capability, "attend_splits", *splits_variant(2, 256, num_splits=8))
        report(capability, "attend_splits", *splits_variant(4, 128, num_splits=1))
        report(capability, "merge_splits", {"HEAD_DIM": 128, "NUM_SPLITS": 16}, {"num_warps": 4})
        report(capability, "rotate_and_store", {"HEAD_DIM": 128, "TILE_HEADS": 8}, {"num_warps": 2})
        report(capability, "add_and_norm", {"HAS_ADDED": True, "WIDTH_PADDED": 4096}, {"num_warps": 8})
        report(capability, "silu_and_multiply", {"TILE": 1024}, {"num_warps": 4})
        report(capability, "attend_split", *split_variant(3, 64, window=0))
        report(capability, "attend_split", *split_variant(4, 128, window=4096))
        report(
            capability, "join_splits", {"HEAD_DIM": 128, "TILE_HEADS": 8, "SPLIT_KEYS": SPLIT_KEYS}, {"num_warps": 4}
        )
        for num_outputs in (4096, 32000):
            report(capability, "multiply", *product_variant(num_outputs))


def tiles_variant(group: int, head_dim: int, window: int) -> tuple[dict[str, Any], dict[str, int]]:
    tiles = chunk_tiles(torch.bfloat16, head_dim)
    constants = {
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "GROUP_PADDED": padded_group(group),
        "TILE_QUERIES": tiles.queries(group),
        "TILE_KEYS": tiles.keys,
        "WINDOW": window,
    }
    return constants, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def splits_variant(group: int, head_dim: int, num_splits: int) -> tuple[dict[str, Any], dict[str, int]]:
    tiles = decode_tiles(torch.bfloat16, group)
    constants = {
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "TILE_HEADS": tiles.rows,
        "TILE_KEYS": tiles.keys,
        "WINDOW": 0,
        "NUM_SPLITS": num_splits,
    }
    return constants, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def split_variant(group: int, head_dim: int, window: int) -> tuple[dict[str, Any], dict[str, int]]:
    tiles = invariant_tiles(torch.bfloat16, head_dim, group)
    constants = {
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "GROUP": group,
        "GROUP_PADDED": padded_group(group),
        "TILE_QUERIES": tiles.queries(group),
        "TILE_KEYS": tiles.keys,
        "SPLIT_KEYS": SPLIT_KEYS,
        "WINDOW": window,
    }
    return constants, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def product_variant(num_outputs: int) -> tuple[dict[str, Any], dict[str, int]]:
    tiles = product_tiles(torch.bfloat16, num_outputs)
    constants = {
        "TILE_ROWS": tiles.rows,
        "TILE_OUTPUTS": tiles.outputs,
        "TILE_INPUTS": tiles.inputs,
        "IS_WHOLE": True,
    }
    return constants, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def report(capability: int, name: str, constants: dict[str, Any], options: dict[str, int]) -> None:
    """Compile one variant, with the hints that a launch on aligned tensors gives, and print what it takes."""
    kernel = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    signature: dict[str, str] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        kind = kind_of(parameter.name, constants)
        signature[parameter.name] = kind
        is_size = parameter.name.endswith("_stride") or parameter.name in SIZES
        if not parameter.do_not_specialize and (kind.startswith("*") or is_size):
            hints[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, hints), target=GPUTarget("cuda", capability, 32), options=options
    )
    usage = resources(compiled.asm["cubin"])
    line = {
        "capability": capability,
        "kernel": name,
        "variant": {key: value for key, value in constants.items() if key in TOLD},
        "shared_bytes": compiled.metadata.shared,
        "registers": usage["REG"],
        "stack_bytes": usage["STACK"],
        "local_bytes": usage["LOCAL"],
        "has_wgmma": "wgmma" in compiled.asm["ptx"],
        "has_mma": "mma.sync" in compiled.asm["ptx"],
        "num_copies_ahead": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", compiled.asm["ptx"])), default=0),
    }
    print(json.dumps(line), flush=True)


def kind_of(name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in SCALARS:
        return SCALARS[name]
    if name.endswith(("_stride", "_row", "_rows", "_heads", "_split", "_splits")) or name in SIZES:
        return "i32"
    return POINTERS.get(name, "*bf16")


def resources(binary: bytes) -> dict[str, int]:
    """Return what cuobjdump, which the triton package brings, says of the one kernel in binary."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, check=True, text=True)
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", done.stdout)}


if __name__ == "__main__":
    main()
