"""The Triton kernels compiled for GPUs that are not here: what the interpreter cannot see."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

TIMEOUT_S = 280
MOST_SHARED_BYTES = {80: 99 << 10, 90: 227 << 10}
"""That one program may have on such a device; on sm_86 and sm_89, which run the code of sm_80, less than there."""


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each kernel in the shapes that are used; half a minute of compiling."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_worker.offline_compile"],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_kernel_spills_registers_or_needs_more_shared_memory_than_there_is(variants: list[dict[str, Any]]) -> None:
    assert {variant["kernel"] for variant in variants} == {
        "attend_tiles",
        "attend_splits",
        "merge_splits",
        "rotate_and_store",
        "add_and_norm",
        "silu_and_multiply",
        "attend_split",
        "join_splits",
        "multiply",
    }
    for variant in variants:
        assert variant["stack_bytes"] == variant["local_bytes"] == 0, variant
        assert variant["shared_bytes"] <= MOST_SHARED_BYTES[variant["capability"]], variant


def test_products_are_on_tensor_cores_and_those_of_tall_tiles_on_hoppers_own(variants: list[dict[str, Any]]) -> None:
    products = [variant for variant in variants if variant["kernel"].startswith(("attend", "multiply"))]
    assert len(products) > 12
    for variant in products:
        is_tall_on_hopper = variant["kernel"] != "attend_splits" and variant["capability"] == 90
        assert variant["has_wgmma" if is_tall_on_hopper else "has_mma"], variant


def test_programs_that_have_a_multiprocessor_to_themselves_load_keys_while_they_multiply(
    variants: list[dict[str, Any]],
) -> None:
    chunks = [variant for variant in variants if variant["kernel"] == "attend_tiles"]
    for variant in chunks:
        assert (variant["num_copies_ahead"] > 0) == (variant["variant"]["HEAD_DIM"] <= 128), variant
