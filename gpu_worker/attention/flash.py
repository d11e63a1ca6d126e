"""Attention by flash-attn: its Hopper build (FA3) and its general one (FA2).

The two differ in everything but the mathematics. FA3's one entry takes ragged queries and a page table together, any
page size, and lengths on the device. FA2's pages are multiples of 256 tokens; its ragged entry never splits a row's
keys, so decodes must go through the other one, or a few of them leave most of the GPU idle. Source: hopper/
flash_attn_interface.py and flash_attn/flash_attn_interface.py (2.8.3).
"""

import importlib.util
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionSpec, BatchLayout, Probe
from gpu_worker.attention.paged import PagedBatch, capability_of, paged_batch

FA2_PAGE_MULTIPLE = 256
FA2_VERSIONS = ((2, 8, 0), (2, 8, 4))
"""From the first, below the second: 2.8.4 looks at lengths on the host, which no CUDA graph survives."""
_HEAD_DIM_MULTIPLE = 8
_FA3_HEAD_DIMS = (64, 96, 128, 192, 256)
_FA2_MAX_HEAD_DIM = 256


class Flash3Attention:
    """FA3: one call for a hybrid batch, or one for its decodes and one for its chunks."""

    name = "fa3"
    is_batch_invariant = False
    block_size_rule = "any; multiples of 128 load by TMA"

    def __init__(self, *, is_split: bool = True) -> None:
        self._is_split = is_split

    def probe(self, spec: AttentionSpec) -> Probe:
        if (refusal := _refusal_of(spec)) is not None:
            return refusal
        if spec.head_dim not in _FA3_HEAD_DIMS:
            return Probe(False, f"heads of {spec.head_dim} are none of {', '.join(map(str, _FA3_HEAD_DIMS))}")
        if importlib.util.find_spec("flash_attn_interface") is None:
            return Probe(
                False, "module flash_attn_interface not found (the package flash-attn lacks it: build its hopper/)"
            )
        if capability_of(spec.device) != (9, 0):
            return Probe(False, "it is for compute capability 9.0 (H100, H200)")
        return _imported(_fa3_function, f"flash-attn {_version_of('flash_attn_3', 'flash-attn-3')}")

    def prepare(self, layout: BatchLayout, spec: AttentionSpec) -> PagedBatch:
        return paged_batch(layout, spec)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: PagedBatch) -> Tensor:
        attend = _fa3_function()
        num_decodes = prepared.num_decodes
        if not self._is_split or not 0 < num_decodes < len(prepared.kv_lens):
            return _fa3(attend, queries, keys, values, prepared, slice(0, len(prepared.kv_lens)))
        output = torch.empty_like(queries)
        output[:num_decodes] = _fa3(attend, queries, keys, values, prepared, slice(0, num_decodes))
        chunks = slice(num_decodes, len(prepared.kv_lens))
        output[num_decodes:] = _fa3(attend, queries, keys, values, prepared, chunks)
        return output


class Flash2Attention:
    """FA2: decodes by the entry that splits keys, chunks by the ragged one."""

    name = "fa2"
    is_batch_invariant = False
    block_size_rule = f"a multiple of {FA2_PAGE_MULTIPLE}"

    def __init__(self, *, is_split: bool = True) -> None:
        self._is_split = is_split

    def probe(self, spec: AttentionSpec) -> Probe:
        if (refusal := _refusal_of(spec)) is not None:
            return refusal
        if spec.head_dim > _FA2_MAX_HEAD_DIM:
            return Probe(False, f"heads of {spec.head_dim} are larger than {_FA2_MAX_HEAD_DIM}")
        if spec.block_size % FA2_PAGE_MULTIPLE:
            return Probe(
                False,
                f"--block-size {spec.block_size} is not a multiple of {FA2_PAGE_MULTIPLE}; "
                f"set --block-size {FA2_PAGE_MULTIPLE}, or use --attention-backend triton",
            )
        if importlib.util.find_spec("flash_attn") is None:
            return Probe(False, "module flash_attn not found (pip install 'legato[cuda]' --no-build-isolation)")
        found = _version_of("flash_attn", "flash-attn")
        least, end = FA2_VERSIONS
        if not least <= _release(found) < end:
            return Probe(False, f"flash-attn {found} is not from {_dotted(least)} to below {_dotted(end)}")
        if capability_of(spec.device) < (8, 0):
            return Probe(False, "it needs compute capability 8.0")
        return _imported(_fa2_functions, f"flash-attn {found}")

    def prepare(self, layout: BatchLayout, spec: AttentionSpec) -> PagedBatch:
        return paged_batch(layout, spec)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: PagedBatch) -> Tensor:
        attend_ragged, attend_decodes = _fa2_functions()
        num_decodes = prepared.num_decodes if self._is_split else 0
        output = torch.empty_like(queries)
        if num_decodes:
            output[:num_decodes] = attend_decodes(
                queries[:num_decodes].unsqueeze(1),  # (rows, 1, heads, head_dim)
                keys,
                values,
                cache_seqlens=prepared.kv_lens[:num_decodes],
                block_table=prepared.block_tables[:num_decodes],
                causal=True,
                window_size=_window_size(prepared),
                softmax_scale=prepared.scale,
            ).squeeze(1)
        if num_decodes < len(prepared.kv_lens):
            starts = prepared.query_starts[num_decodes:] - prepared.query_starts[num_decodes]
            kv_lens = prepared.kv_lens[num_decodes:]
            # Only the differences count: where a row's keys lie, its table says.
            kv_starts = torch.nn.functional.pad(kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
            output[num_decodes:] = attend_ragged(
                queries[num_decodes:],
                keys,
                values,
                cu_seqlens_q=starts,
                cu_seqlens_k=kv_starts,
                max_seqlen_q=max(1, prepared.max_query_len),
                max_seqlen_k=prepared.max_kv_len,
                causal=True,
                block_table=prepared.block_tables[num_decodes:],
                window_size=_window_size(prepared),
                softmax_scale=prepared.scale,
            )
        return output


def _fa3(
    attend: Callable[..., Any], queries: Tensor, keys: Tensor, values: Tensor, prepared: PagedBatch, rows: slice
) -> Tensor:
    """Attend to some neighbouring rows in one call; return their queries' results."""
    first_token = min(rows.start, prepared.num_decodes)  # Rows before the first chunk have one query each.
    last_token = rows.stop if rows.stop <= prepared.num_decodes else queries.shape[0]
    starts = prepared.query_starts[rows.start : rows.stop + 1]
    is_decodes = rows.stop <= prepared.num_decodes
    attended = attend(
        queries[first_token:last_token],
        keys,
        values,
        cache_seqlens=prepared.kv_lens[rows],
        page_table=prepared.block_tables[rows],
        cu_seqlens_q=starts if rows.start == 0 else starts - prepared.query_starts[rows.start],
        max_seqlen_q=1 if is_decodes else max(1, prepared.max_query_len),
        causal=True,
        window_size=_window_size(prepared),
        softmax_scale=prepared.scale,
    )
    result: Tensor = attended[0] if isinstance(attended, tuple) else attended
    return result


def _window_size(prepared: PagedBatch) -> tuple[int, int]:
    """Return how many keys before and after its own a query sees, as flash-attn counts them; -1 is all."""
    return (-1, -1) if prepared.window is None else (prepared.window - 1, 0)


def _fa3_function() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_with_kvcache  # noqa: PLC0415  # Not on every machine.

    function: Callable[..., Any] = flash_attn_with_kvcache
    return function


def _fa2_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the entry for ragged rows, and the one for rows of one query."""
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: PLC0415  # Not on every machine.

    return flash_attn_varlen_func, flash_attn_with_kvcache


def _refusal_of(spec: AttentionSpec) -> Probe | None:
    """Return what keeps either version from serving spec."""
    if torch.device(spec.device).type != "cuda":
        return Probe(False, f"it runs on CUDA devices, not on {spec.device}")
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return Probe(False, f"it takes float16 and bfloat16, not {spec.dtype}")
    if spec.head_dim % _HEAD_DIM_MULTIPLE:
        return Probe(False, f"heads of {spec.head_dim} are no multiple of {_HEAD_DIM_MULTIPLE}")
    return None


def _imported(load: Callable[[], object], detail: str) -> Probe:
    """Return detail if load works. A build for another torch or another GPU fails here, with an error of the linker."""
    try:
        load()
    except (ImportError, OSError) as error:
        return Probe(False, f"it does not load here: {error}")
    return Probe(True, detail)


def _version_of(*names: str) -> str:
    """Return the version of the first distribution of these names that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _release(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 8, 3) of 2.8.3.post2, and of 2.8.3+cu12, as ready-made builds are
    called."""
    numbers: list[int] = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
