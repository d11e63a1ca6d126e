"""How flash-attn is called and when it is refused, without a GPU.

Its two modules are stood in for by plain functions of their documented signatures (flash-attn 2.8.3:
flash_attn_varlen_func, flash_attn_with_kvcache; hopper/flash_attn_interface.py: flash_attn_with_kvcache), so a wrong
offset, length or table shows. Whether the real kernels do what their documents say is for `legato gpu-check`.
"""

import re
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_worker.attention import choose_backend, cuda_backends, fitted
from gpu_worker.attention.base import AttentionBackend, AttentionSpec, BatchLayout, bind
from gpu_worker.attention.flash import Flash2Attention, Flash3Attention
from gpu_worker.attention.paged import PagedBatch, TorchPagedAttention
from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.attention.smoke import smoke_test
from gpu_worker.attention.triton import TritonAttention
from gpu_worker.errors import BackendUnavailable

BLOCK_SIZE = 16
SPEC = AttentionSpec(
    device="cuda", dtype=torch.bfloat16, num_heads=4, num_kv_heads=2, head_dim=64, block_size=BLOCK_SIZE
)


def paged(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lens: list[tuple[int, int]],
    tables: Tensor,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
) -> Tensor:
    """Rows of (query_len, kv_len), causal, the last query aligned with the last key."""
    assert window_size == (-1, -1) or window_size[1] == 0, "nothing after its own key"
    window = None if window_size == (-1, -1) else window_size[0] + 1
    spec = replace(SPEC, device="cpu", num_heads=queries.shape[1], window=window, scale=softmax_scale)
    layout = BatchLayout(
        query_lens=tuple(row[0] for row in lens), kv_lens=tuple(row[1] for row in lens), block_tables=tables.long()
    )
    return bind(ReferenceAttention(), layout, spec)(queries, keys, values)


def lengths(starts: Tensor, name: str) -> list[int]:
    assert starts.dtype == torch.int32, f"{name} is int32"
    assert starts[0] == 0, f"{name} starts at 0"
    return starts.diff().tolist()


def fa2_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    block_table: Tensor,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
) -> Tensor:
    rows = list(zip(lengths(cu_seqlens_q, "cu_seqlens_q"), lengths(cu_seqlens_k, "cu_seqlens_k"), strict=True))
    assert causal
    assert max(row[0] for row in rows) <= max_seqlen_q
    assert max(row[1] for row in rows) <= max_seqlen_k
    assert block_table.dtype == torch.int32
    return paged(q, k, v, rows, block_table, window_size, softmax_scale)


def fa2_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
) -> Tensor:
    assert q.shape[1] == 1, "rows of one query"
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    rows = [(1, kv_len) for kv_len in cache_seqlens.tolist()]
    attended = paged(q.squeeze(1), k_cache, v_cache, rows, block_table, window_size, softmax_scale)
    return attended.unsqueeze(1)


def fa3_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
) -> Tensor:
    query_lens = lengths(cu_seqlens_q, "cu_seqlens_q")
    assert max(query_lens) <= max_seqlen_q
    assert sum(query_lens) == len(q)
    assert causal
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    rows = list(zip(query_lens, cache_seqlens.tolist(), strict=True))
    return paged(q, k_cache, v_cache, rows, page_table, window_size, softmax_scale)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    fa2, fa3 = ModuleType("flash_attn"), ModuleType("flash_attn_interface")
    vars(fa2).update(flash_attn_varlen_func=fa2_varlen, flash_attn_with_kvcache=fa2_kvcache)
    vars(fa3).update(flash_attn_with_kvcache=fa3_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn", fa2)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fa3)


BATCHES = {
    "decodes": [(1, 5), (1, 40), (1, 16)],
    "chunks": [(7, 30), (16, 16)],
    "hybrid": [(1, 5), (1, 40), (7, 30), (1, 9), (16, 16)],
}


@pytest.mark.parametrize(("window", "scale"), [(None, None), (9, 0.3)], ids=["plain", "window and scale"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "one"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend_type", [Flash2Attention, Flash3Attention, TorchPagedAttention])
def test_a_hybrid_batch_is_handed_over_whole(
    stand_ins: None, backend_type: Any, batch: str, is_split: bool, window: int | None, scale: float | None
) -> None:
    rows = BATCHES[batch]
    torch.manual_seed(0)
    nums_blocks = [-(-kv_len // BLOCK_SIZE) for _, kv_len in rows]
    keys, values = torch.randn(2, sum(nums_blocks), BLOCK_SIZE, 2, 64)
    tables = torch.zeros(len(rows), max(nums_blocks), dtype=torch.int64)
    order = torch.randperm(sum(nums_blocks))
    for row, count in enumerate(nums_blocks):
        tables[row, :count], order = order[:count], order[count:]
    queries = torch.randn(sum(row[0] for row in rows), 4, 64)
    layout = BatchLayout(
        query_lens=tuple(row[0] for row in rows), kv_lens=tuple(row[1] for row in rows), block_tables=tables
    )
    backend: AttentionBackend[Any] = (
        backend_type() if backend_type is TorchPagedAttention else backend_type(is_split=is_split)
    )
    spec = replace(SPEC, device="cpu", window=window, scale=scale)
    attended = bind(backend, layout, spec)(queries, keys, values)
    expected = bind(ReferenceAttention(), layout, spec)(queries, keys, values)
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("version", "is_served"),
    [
        ("2.8.3.post2", True),
        ("2.8.3+cu12torch2.8cxx11abiTRUE", True),  # As ready-made builds are called.
        ("2.7.4", False),
        ("2.8.4", False),
        ("2.8.4+cu13", False),
    ],
)
def test_versions_of_flash_attn_are_served_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch, version: str, is_served: bool
) -> None:
    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = module.flash_attn_with_kvcache = fa2_varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr("gpu_worker.attention.flash.version", lambda name: version)
    monkeypatch.setattr("gpu_worker.attention.flash.capability_of", lambda device: (9, 0))
    probe = Flash2Attention().probe(replace(SPEC, block_size=256))
    assert probe.is_available is is_served, probe.detail


def test_each_refusal_says_why_and_what_would_help() -> None:
    refusals: dict[Any, list[tuple[AttentionSpec, str]]] = {
        Flash2Attention: [
            (replace(SPEC, block_size=16), "--block-size 16 is not a multiple of 256; set --block-size 256"),
            (replace(SPEC, dtype=torch.float32), "takes float16 and bfloat16, not torch.float32"),
            (replace(SPEC, head_dim=264, block_size=256), "heads of 264 are larger than 256"),
            (replace(SPEC, block_size=256), "module flash_attn not found"),
        ],
        Flash3Attention: [
            (replace(SPEC, head_dim=80), "heads of 80 are none of 64, 96"),
            (SPEC, "module flash_attn_interface not found .*build its hopper"),
            (replace(SPEC, device="cpu"), "runs on CUDA devices, not on cpu"),
        ],
        TritonAttention: [(replace(SPEC, head_dim=80), "heads of 80 are none of")],
    }
    for backend_type, cases in refusals.items():
        for spec, why in cases:
            probe = backend_type().probe(spec)
            assert not probe.is_available
            assert re.search(why, probe.detail), probe.detail


def test_a_choice_by_name_names_each_back_end_that_was_meant_and_falls_back_to_none() -> None:
    with pytest.raises(BackendUnavailable, match=r"'flash_attn' is unavailable: fa3: .*; fa2: --block-size 16"):
        choose_backend("flash_attn", SPEC)
    with pytest.raises(BackendUnavailable, match=r"'auto' is unavailable: fa3: .*fa2: .*triton: (?!.*torch:)"):
        choose_backend("auto", SPEC)
    with pytest.raises(
        BackendUnavailable, match=r"no attention back end 'cpu' for cuda; known: fa3, fa2, triton, torch"
    ):
        choose_backend("cpu", SPEC)


class OutOfResources(Exception):
    """Of Triton, whose errors are neither RuntimeErrors nor ValueErrors."""


def test_a_kernel_that_does_not_fit_the_gpu_is_a_reason_not_to_serve() -> None:
    class Unfit(TorchPagedAttention):
        def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: PagedBatch) -> Tensor:
            raise OutOfResources("out of resource: shared memory, Required: 147968, Hardware limit: 101376.\nReduce")

    spec = replace(SPEC, device="cpu", dtype=torch.float32)
    problem = smoke_test(Unfit(), spec)
    assert problem == (
        "its first batch failed: out of resource: shared memory, Required: 147968, Hardware limit: 101376."
    )
    assert smoke_test(TorchPagedAttention(), spec) is None


def test_pages_are_as_large_as_each_back_end_wants_unless_a_size_was_asked_for() -> None:
    free, asked = replace(SPEC, block_size=0), replace(SPEC, block_size=32)
    assert {backend.name: fitted(free, backend).block_size for backend in cuda_backends()} == {
        "fa3": 16,
        "fa2": 256,
        "triton": 16,
        "torch": 16,
    }
    assert {fitted(asked, backend).block_size for backend in cuda_backends()} == {32}
    # Left to itself, fa2 is not refused for its pages.
    with pytest.raises(BackendUnavailable, match="fa2: module flash_attn not found"):
        choose_backend("fa2", free)
