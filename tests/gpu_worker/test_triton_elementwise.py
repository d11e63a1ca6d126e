"""The fused passes between matrix products, in Triton's interpreter, against their plain twins."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.cuda.operations import Operations, TorchOperations, TritonOperations
from gpu_worker.models.rope import RopeConfig, rotation_table

PLAIN: Operations = TorchOperations()
FUSED: Operations = TritonOperations()
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 1, 128), (2, 2, 64)])
def test_queries_are_turned_and_keys_and_values_stored_at_their_slots_alone(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    cosine, sine = rotation_table(RopeConfig(theta=10000.0), head_dim, 64, dtype)
    projected = random(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    pools = [[torch.full((3, 5, num_kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)] for _ in range(2)]
    queries = [
        operations.rotate_and_store(
            projected,
            positions=torch.tensor([0, 63, 5, 6]),
            slots=torch.tensor([14, 0, 7, 3]),
            cosine=cosine,
            sine=sine,
            keys=keys,
            values=values,
            num_heads=num_heads,
        )
        for operations, (keys, values) in zip((FUSED, PLAIN), pools, strict=True)
    ]
    assert_close(*queries)
    for fused, plain in zip(*pools, strict=True):
        assert_close(fused, plain)
        assert (fused.flatten(0, 1)[[1, 2, 4, 5, 6, 8, 13]] == 7.0).all()


@DTYPES
@pytest.mark.parametrize("width", [48, 64, 100])
@pytest.mark.parametrize("has_added", [False, True])
def test_the_residual_takes_the_sum_and_the_norm_is_of_the_sum(has_added: bool, width: int, dtype: torch.dtype) -> None:
    added = random(3, width, dtype=dtype, seed=1) if has_added else None
    weight = random(width, dtype=dtype, seed=2)
    fused, plain = random(3, width, dtype=dtype), random(3, width, dtype=dtype)
    assert_close(FUSED.add_and_norm(fused, added, weight, 1e-5), PLAIN.add_and_norm(plain, added, weight, 1e-5))
    assert_close(fused, plain)


@DTYPES
@pytest.mark.parametrize("width", [48, 1500])
def test_the_gate_is_activated_and_multiplied(width: int, dtype: torch.dtype) -> None:
    gate_up = 4 * random(3, 2 * width, dtype=dtype)
    assert_close(FUSED.silu_and_multiply(gate_up), PLAIN.silu_and_multiply(gate_up))
