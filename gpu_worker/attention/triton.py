"""Attention by our own Triton kernels: for CUDA machines without flash-attn, and for those who want no other."""

import importlib.util
import os

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionSpec, BatchLayout, Probe
from gpu_worker.attention.paged import PagedBatch, capability_of, paged_batch

LEAST_CAPABILITY = (8, 0)
HEAD_DIMS = (16, 32, 64, 128, 256)
_INTERPRETED_MULTIPROCESSORS = 4


class TritonAttention:
    """Decodes with their keys split over programs, then chunks in tiles."""

    name = "triton"
    is_batch_invariant = False  # How many programs share a decode's keys depends on how many decodes there are.
    block_size_rule = "any"

    def __init__(self, *, is_split: bool = True) -> None:
        """is_split: decodes by the kernel that splits their keys; else all rows by the kernel for chunks."""
        self._is_split = is_split
        self._num_multiprocessors = 0

    def probe(self, spec: AttentionSpec) -> Probe:
        if importlib.util.find_spec("triton") is None:
            return Probe(False, "the package triton is not installed (CUDA builds of torch bring it)")
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        device = torch.device(spec.device)
        if device.type != "cuda" and not is_interpreted:
            return Probe(False, f"it runs on CUDA devices, not on {spec.device}")
        if spec.head_dim not in HEAD_DIMS:
            return Probe(False, f"heads of {spec.head_dim} are none of {', '.join(map(str, HEAD_DIMS))}")
        if is_interpreted and spec.dtype == torch.bfloat16:
            return Probe(False, "Triton's interpreter computes bfloat16 wrong")
        if device.type == "cuda" and capability_of(spec.device) < LEAST_CAPABILITY:
            return Probe(False, f"it needs compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}")
        import triton  # noqa: PLC0415  # Not on every machine.

        return Probe(True, f"triton {triton.__version__}{', interpreted' if is_interpreted else ''}")

    def prepare(self, layout: BatchLayout, spec: AttentionSpec) -> PagedBatch:
        return paged_batch(layout, spec)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: PagedBatch) -> Tensor:
        # Not above: TRITON_INTERPRET must be set before, and triton must be there.
        from gpu_worker.triton_kernels.attention import attend_chunks, attend_decodes  # noqa: PLC0415
        from gpu_worker.triton_kernels.tiles import num_splits  # noqa: PLC0415

        output = torch.empty_like(queries)
        num_decodes = prepared.num_decodes if self._is_split else 0
        if num_decodes:
            attend_decodes(
                queries[:num_decodes],
                keys,
                values,
                output[:num_decodes],
                kv_lens=prepared.kv_lens,
                block_tables=prepared.block_tables,
                num_splits=num_splits(num_decodes, keys.shape[2], self._multiprocessors(queries.device)),
                window=prepared.window or 0,
                scale=prepared.scale,
            )
        if num_decodes < prepared.kv_lens.shape[0]:
            attend_chunks(
                queries,
                keys,
                values,
                output,
                query_starts=prepared.query_starts,
                kv_lens=prepared.kv_lens,
                block_tables=prepared.block_tables,
                first_row=num_decodes,
                window=prepared.window or 0,
                scale=prepared.scale,
            )
        return output

    def _multiprocessors(self, device: torch.device) -> int:
        if not self._num_multiprocessors:
            self._num_multiprocessors = (
                torch.cuda.get_device_properties(device).multi_processor_count
                if device.type == "cuda"
                else _INTERPRETED_MULTIPROCESSORS
            )
        return self._num_multiprocessors


class InvariantTritonAttention(TritonAttention):
    """The same by kernels whose sums have one order: keys in splits of a fixed size, counted from the first one.

    One call for all rows: a decode is computed as a chunk of one token.
    """

    is_batch_invariant = True

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: PagedBatch) -> Tensor:
        from gpu_worker.triton_kernels import invariant  # noqa: PLC0415  # As above.

        output = torch.empty_like(queries)
        invariant.attend(
            queries,
            keys,
            values,
            output,
            query_starts=prepared.query_starts,
            kv_lens=prepared.kv_lens,
            block_tables=prepared.block_tables,
            max_kv_len=prepared.max_kv_len,
            window=prepared.window or 0,
            scale=prepared.scale,
        )
        return output
