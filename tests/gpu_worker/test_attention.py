"""Attention back ends against the reference, and the reference against attention without pages."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.attention import CPU_BACKENDS, choose_backend
from gpu_worker.attention.base import AttentionSpec, BatchLayout, bind
from gpu_worker.attention.cpu import LEAST_DIRECT_LEN, CpuAttention
from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.errors import BackendUnavailable
from gpu_worker.kernels.library import Kernels
from tests.gpu_worker.world import KERNELS

HEAD_DIM = 16
TOLERANCE = {
    torch.float32: 2e-6,  # of values near 1: a softmax-weighted mean, summed in another order
    torch.bfloat16: 2e-2,  # the reference works in float32; others may round scores and weights to 8 bits
}
OTHERS = [backend for backend in CPU_BACKENDS if backend is not ReferenceAttention]

# (query_len, kv_len) of each row.
DECODES = [(1, 1), (1, 2), (1, 31), (1, 64), (1, 200)]
CHUNKS = [(2, 2), (33, 33), (5, 90), (64, 65)]
LONG = [(1, LEAST_DIRECT_LEN + 5), (1, 3), (4, LEAST_DIRECT_LEN + 9)]
BATCHES = {"decodes": DECODES, "chunks": CHUNKS, "hybrid": DECODES + CHUNKS, "long": LONG, "one decode": [(1, 50)]}


class Pages:
    """Random keys, values and queries for a batch, its blocks strewn over a pool or one after another."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        num_kv_heads: int,
        group: int,
        block_size: int,
        dtype: torch.dtype,
        is_strewn: bool,
        head_dim: int = HEAD_DIM,
        window: int | None = None,
        scale: float | None = None,
    ) -> None:
        torch.manual_seed(0)
        nums_blocks = [-(-kv_len // block_size) for _, kv_len in rows]
        num_blocks = sum(nums_blocks) + 7
        free = list(range(num_blocks))
        if is_strewn:
            random.Random(0).shuffle(free)
        tables = torch.empty(len(rows), max(nums_blocks), dtype=torch.int64)
        # Blocks that nobody owns hold NaN, and so does nothing else: what reads one shows.
        self.keys = torch.full((num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype)
        self.values = self.keys.clone()
        for index, count in enumerate(nums_blocks):
            blocks, free = free[:count], free[count:]
            tables[index, :count] = torch.tensor(blocks)
            tables[index, count:] = blocks[-1]
            self.keys[blocks] = torch.randn(count, block_size, num_kv_heads, head_dim).to(dtype)
            self.values[blocks] = torch.randn(count, block_size, num_kv_heads, head_dim).to(dtype)
        self.layout = BatchLayout(
            query_lens=tuple(query_len for query_len, _ in rows),
            kv_lens=tuple(kv_len for _, kv_len in rows),
            block_tables=tables,
        )
        num_heads = num_kv_heads * group
        self.queries = torch.randn(sum(self.layout.query_lens), num_heads, head_dim).to(dtype)
        self.spec = AttentionSpec(
            device="cpu",
            dtype=dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            kernels=KERNELS,
            window=window,
            scale=scale,
        )

    def attend(self, backend: Any) -> Tensor:
        attention = bind(backend, self.layout, self.spec)
        return attention(self.queries, self.keys, self.values)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("is_strewn", [True, False], ids=["strewn", "in a run"])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend_type", OTHERS)
def test_every_backend_equals_the_reference(
    backend_type: Any, batch: str, group: int, is_strewn: bool, dtype: torch.dtype
) -> None:
    for block_size in (16, 5):
        pages = Pages(
            BATCHES[batch], num_kv_heads=2, group=group, block_size=block_size, dtype=dtype, is_strewn=is_strewn
        )
        attended = pages.attend(backend_type())
        assert attended.dtype == dtype
        torch.testing.assert_close(
            attended.float(), pages.attend(ReferenceAttention()).float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("is_strewn", [True, False], ids=["strewn", "in a run"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("window", [1, 7, 32, 100])
@pytest.mark.parametrize("backend_type", OTHERS)
def test_windows_scales_and_larger_heads_equal_the_reference(
    backend_type: Any, window: int, batch: str, is_strewn: bool, dtype: torch.dtype
) -> None:
    for block_size, group, head_dim in ((16, 8, 64), (5, 4, 128)):
        pages = Pages(
            BATCHES[batch],
            num_kv_heads=1,
            group=group,
            block_size=block_size,
            dtype=dtype,
            is_strewn=is_strewn,
            head_dim=head_dim,
            window=window,
            scale=0.05,
        )
        torch.testing.assert_close(
            pages.attend(backend_type()).float(),
            pages.attend(ReferenceAttention()).float(),
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )


def test_blocks_before_a_window_are_not_read() -> None:
    pages = Pages(
        [(1, 90), (3, 77), (1, 64)],
        num_kv_heads=2,
        group=3,
        block_size=16,
        dtype=torch.float32,
        is_strewn=True,
        window=20,
    )
    expected = pages.attend(CpuAttention())
    for row, first_key in enumerate((70, 55, 44)):
        forgotten = pages.layout.block_tables[row, : first_key // 16]
        pages.keys[forgotten] = pages.values[forgotten] = float("nan")
    assert torch.equal(pages.attend(CpuAttention()), expected)


@pytest.mark.parametrize("window", [None, 9])
def test_the_reference_sees_what_a_window_leaves(window: int | None) -> None:
    length = 40
    pages = Pages(
        [(length, length)],
        num_kv_heads=1,
        group=1,
        block_size=64,
        dtype=torch.float32,
        is_strewn=False,
        window=window,
        scale=0.5,
    )
    attended = pages.attend(ReferenceAttention())
    keys, values = pages.keys[0, :length, 0], pages.values[0, :length, 0]
    for position in (0, 8, 9, 39):
        first = 0 if window is None else max(0, position - window + 1)
        weights = (keys[first : position + 1] @ pages.queries[position, 0] * 0.5).softmax(dim=0)
        torch.testing.assert_close(attended[position, 0], weights @ values[first : position + 1], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend_type", OTHERS)
def test_blocks_that_look_like_a_run_only_at_their_ends_are_not_taken_for_one(backend_type: Any) -> None:
    pages = Pages([(1, 60)], num_kv_heads=2, group=3, block_size=16, dtype=torch.float32, is_strewn=False)
    # A decode sees all of its whole blocks, in whatever order; so one is missing here, and another comes twice.
    pages.layout.block_tables[0] = torch.tensor([0, 1, 1, 3])
    torch.testing.assert_close(pages.attend(backend_type()), pages.attend(ReferenceAttention()), atol=2e-6, rtol=2e-6)


def test_the_reference_equals_causal_attention_over_unpaged_keys() -> None:
    length, block_size = 40, 16
    pages = Pages(
        [(length, length)], num_kv_heads=2, group=3, block_size=block_size, dtype=torch.float32, is_strewn=True
    )
    order = [int(block) for block in pages.layout.block_tables[0]]
    keys = torch.cat([pages.keys[block] for block in order])[:length]
    values = torch.cat([pages.values[block] for block in order])[:length]
    expected = functional.scaled_dot_product_attention(
        pages.queries.transpose(0, 1).double(),
        keys.repeat_interleave(3, dim=1).transpose(0, 1).double(),
        values.repeat_interleave(3, dim=1).transpose(0, 1).double(),
        is_causal=True,
    ).transpose(0, 1)
    torch.testing.assert_close(pages.attend(ReferenceAttention()), expected.float(), atol=2e-6, rtol=2e-6)


def spec(device: str = "cpu", kernels: Kernels | None = None, head_dim: int = HEAD_DIM) -> AttentionSpec:
    return AttentionSpec(
        device=device,
        dtype=torch.float32,
        num_heads=2,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=16,
        kernels=kernels,
    )


def test_auto_takes_the_first_backend_that_can_serve() -> None:
    assert choose_backend("auto", spec(kernels=KERNELS)).name == "native"
    assert choose_backend("auto", spec(kernels=KERNELS, head_dim=24)).name == "cpu"
    assert choose_backend("auto", spec()).name == "cpu"


def test_a_backend_chosen_by_name_never_falls_back() -> None:
    assert choose_backend("reference", spec()).name == "reference"
    with pytest.raises(BackendUnavailable, match="native: the kernels are switched off or could not be built"):
        choose_backend("native", spec())
    with pytest.raises(BackendUnavailable, match="known: native, cpu, reference"):
        choose_backend("fa3", spec())
