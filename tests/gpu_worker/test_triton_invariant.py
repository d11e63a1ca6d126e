"""Kernels whose sums have one order, in Triton's interpreter: right, and the same to the bit for every batch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.attention.base import BatchLayout
from gpu_worker.triton_kernels import invariant
from gpu_worker.triton_kernels.tiles import ProductTiles
from tests.gpu_worker.attention_case import SMALL, Case, assert_equal

SPLIT_KEYS = 16
SMALL_PRODUCT = ProductTiles(rows=16, outputs=16, inputs=16, num_warps=4, num_stages=2)
ROW_LEN = 35
"""Keys of the row that is cut: three splits, the last of them not full."""
Piece = tuple[int, int, int]
"""A row, and which of its queries: [start, end)."""


def run(case: Case, output: Tensor, *, window: int = 0, scratch_bytes: int = 1 << 20) -> Tensor:
    invariant.attend(
        case.queries,
        case.keys,
        case.values,
        output,
        query_starts=case.query_starts,
        kv_lens=case.kv_lens,
        block_tables=case.layout.block_tables.int(),
        max_kv_len=max(case.layout.kv_lens),
        window=window,
        tiles=SMALL,
        split_keys=SPLIT_KEYS,
        scratch_bytes=scratch_bytes,
    )
    return output


def attended(case: Case, pieces: Sequence[Piece], *, window: int = 0, scratch_bytes: int = 1 << 20) -> list[Tensor]:
    """Return the attention of pieces of a case's rows in one batch."""
    lens = [end - start for _, start, end in pieces]
    of_row = torch.split(case.queries, list(case.layout.query_lens))
    batch = replace(
        case,
        queries=torch.cat([of_row[row][start:end] for row, start, end in pieces]),
        layout=BatchLayout(
            query_lens=tuple(lens),
            kv_lens=tuple(end for _, _, end in pieces),
            block_tables=case.layout.block_tables[[row for row, _, _ in pieces]],
        ),
    )
    output = run(batch, torch.full_like(batch.queries, 7.0), window=window, scratch_bytes=scratch_bytes)
    return list(torch.split(output, lens))


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "window"),
    [(1, 64, torch.float32, 0), (3, 64, torch.float16, 21), (4, 128, torch.float32, 21)],
    ids=str,
)
def test_decodes_chunks_and_rows_without_queries_equal_the_reference(
    group: int, head_dim: int, dtype: torch.dtype, window: int
) -> None:
    rows = [(1, 1), (1, 33), (1, 50), (17, 17), (5, 40), (0, 9)]
    case = Case.make(rows, group=group, head_dim=head_dim, dtype=dtype, num_kv_heads=1)
    assert_equal(run(case, torch.full_like(case.queries, 7.0), window=window), case.expected(window))


def test_the_tiles_of_a_device_give_what_the_reference_gives() -> None:
    case = Case.make([(20, 70)], num_kv_heads=1)
    output = torch.full_like(case.queries, 7.0)
    invariant.attend(
        case.queries,
        case.keys,
        case.values,
        output,
        query_starts=case.query_starts,
        kv_lens=case.kv_lens,
        block_tables=case.layout.block_tables.int(),
        max_kv_len=70,
    )
    assert_equal(output, case.expected())


@cache
def row_and_neighbour() -> Case:
    return Case.make([(ROW_LEN, ROW_LEN), (9, 9)], group=1, head_dim=16, num_kv_heads=1)


@cache
def whole_row(window: int) -> Tensor:
    return attended(row_and_neighbour(), [(0, 0, ROW_LEN)], window=window)[0]


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    cuts=st.sets(st.integers(1, ROW_LEN - 1), min_size=1, max_size=1),
    decodes=st.sets(st.integers(0, ROW_LEN - 1), min_size=1, max_size=3),
    splits_per_round=st.integers(1, 3),
    beside=st.integers(1, 9),
    window=st.sampled_from((0, 20)),
)
@example(cuts={1}, decodes={ROW_LEN - 1}, splits_per_round=1, beside=1, window=0)
def test_a_query_attends_alike_to_the_bit_however_its_row_is_cut_and_whoever_is_beside_it(
    cuts: set[int], decodes: set[int], splits_per_round: int, beside: int, window: int
) -> None:
    case, whole = row_and_neighbour(), whole_row(window)
    edges = [0, *sorted(cuts), ROW_LEN]
    for start, end in pairwise(edges):
        _, chunk = attended(case, [(1, 0, beside), (0, start, end)], window=window)
        assert torch.equal(chunk, whole[start:end])
    pieces = [(0, at, at + 1) for at in sorted(decodes)]
    split_bytes = 4 * len(pieces) * case.queries[0].numel()
    alone = attended(case, pieces, window=window, scratch_bytes=splits_per_round * split_bytes)
    for (_, start, end), decode in zip(pieces, alone, strict=True):
        assert torch.equal(decode, whole[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 48, 33), (130, 70, 20)])
def test_products_equal_those_of_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, num_inputs, num_outputs = shape
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    weights = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    expected = (inputs.double() @ weights.double().T).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(invariant.linear(inputs, weights), expected, atol=10 * tolerance, rtol=tolerance)


@cache
def factors() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, weights, and their product in one batch."""
    generator = torch.Generator().manual_seed(2)
    inputs, weights = torch.randn(40, 50, generator=generator), torch.randn(20, 50, generator=generator)
    return inputs, weights, invariant.linear(inputs, weights, tiles=SMALL_PRODUCT)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(rows=st.lists(st.integers(0, 39), min_size=1, max_size=24))
def test_a_rows_product_is_the_same_to_the_bit_whichever_rows_are_beside_it(rows: list[int]) -> None:
    inputs, weights, whole = factors()
    output = torch.full((len(rows), 20), 7.0)
    assert invariant.linear(inputs[rows], weights, output, tiles=SMALL_PRODUCT) is output
    assert torch.equal(output, whole[rows])
