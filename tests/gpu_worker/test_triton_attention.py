"""The Triton kernels of attention in Triton's interpreter, against the plain reference.

The interpreter runs programs one after another on the CPU. It gets bfloat16 wrong (it multiplies the bit patterns), so
that dtype is for `legato gpu-check` to look at.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_worker.triton_kernels.attention import attend_chunks, attend_decodes
from gpu_worker.triton_kernels.tiles import Tiles, num_splits
from tests.gpu_worker.attention_case import SMALL, Case, assert_equal


def as_chunks(
    case: Case, *, first_row: int = 0, window: int = 0, scale: float | None = None, tiles: Tiles | None = SMALL
) -> Tensor:
    output = torch.full_like(case.queries, 7.0)
    attend_chunks(
        case.queries,
        case.keys,
        case.values,
        output,
        query_starts=case.query_starts,
        kv_lens=case.kv_lens,
        block_tables=case.layout.block_tables.int(),
        first_row=first_row,
        window=window,
        scale=scale,
        tiles=tiles,
    )
    return output


def as_decodes(case: Case, splits: int, window: int = 0, scale: float | None = None) -> Tensor:
    output = torch.full_like(case.queries, 7.0)
    attend_decodes(
        case.queries,
        case.keys,
        case.values,
        output,
        kv_lens=case.kv_lens,
        block_tables=case.layout.block_tables.int(),
        num_splits=splits,
        window=window,
        scale=scale,
    )
    return output


HYBRID = [(1, 1), (1, 33), (17, 17), (5, 40), (16, 16), (1, 20)]
DECODES = [(1, 1), (1, 16), (1, 17), (1, 150)]
SHAPES = pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [
        (1, 64, torch.float32),
        (3, 64, torch.float16),
        (3, 128, torch.float32),
        (4, 128, torch.float16),
        (8, 128, torch.float32),
        (8, 64, torch.float16),
    ],
    ids=str,
)
"""A program takes some milliseconds in the interpreter, so not every combination is tried."""


@SHAPES
def test_a_hybrid_batch_with_context_equals_the_reference(group: int, head_dim: int, dtype: torch.dtype) -> None:
    case = Case.make(HYBRID, group=group, head_dim=head_dim, dtype=dtype, num_kv_heads=1 if group > 4 else 2)
    assert_equal(as_chunks(case), case.expected())


@pytest.mark.parametrize("block_size", [5, 256])
def test_any_block_size_will_do(block_size: int) -> None:
    case = Case.make(HYBRID, block_size=block_size)
    assert_equal(as_chunks(case), case.expected())


def test_the_tiles_of_a_device_give_what_small_ones_give() -> None:
    case = Case.make([(200, 210), (1, 90)], num_kv_heads=1)
    assert_equal(as_chunks(case, tiles=None), case.expected())


@pytest.mark.parametrize("window", [1, 16, 21])
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    case = Case.make([(1, 60), (20, 50)])
    assert_equal(as_chunks(case, window=window), case.expected(window))


def test_scores_are_scaled_as_the_model_says() -> None:
    case = Case.make([(1, 30), (4, 20)])
    assert_equal(as_chunks(case, scale=0.3), case.expected(scale=0.3))
    decodes = Case.make(DECODES)
    assert_equal(as_decodes(decodes, 2, scale=0.3), decodes.expected(scale=0.3))


def test_rows_before_the_first_and_rows_without_queries_are_left_alone() -> None:
    case = Case.make([(1, 30), (1, 4), (0, 9), (19, 25), (0, 3), (2, 2)])
    output = as_chunks(case, first_row=2)
    assert (output[:2] == 7.0).all()
    assert_equal(output[2:], case.expected()[2:])


@SHAPES
def test_decodes_equal_the_reference(group: int, head_dim: int, dtype: torch.dtype) -> None:
    case = Case.make(DECODES, group=group, head_dim=head_dim, dtype=dtype)
    for splits in (1, 4):
        assert_equal(as_decodes(case, splits), case.expected())


@pytest.mark.parametrize("window", [1, 40])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_window_hides_what_lies_before_it_from_decodes(splits: int, window: int) -> None:
    case = Case.make(DECODES)
    assert_equal(as_decodes(case, splits, window), case.expected(window))


def test_more_rows_get_fewer_splits_and_one_row_no_more_than_the_most() -> None:
    assert [num_splits(rows, num_kv_heads=8, num_multiprocessors=132) for rows in (1, 4, 8, 16, 32, 64)] == [
        16,
        16,
        8,
        4,
        2,
        1,
    ]
