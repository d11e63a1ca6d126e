"""Attention back ends, and the choice of one at start-up."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog
import torch

from gpu_worker.attention.base import AttentionBackend, AttentionSpec
from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.flash import FA2_PAGE_MULTIPLE, Flash2Attention, Flash3Attention
from gpu_worker.attention.native import NativeAttention
from gpu_worker.attention.paged import TorchPagedAttention
from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.attention.smoke import smoke_test
from gpu_worker.attention.triton import InvariantTritonAttention, TritonAttention
from gpu_worker.errors import BackendUnavailable
from gpu_worker.slots import DEFAULT_BLOCK_SIZE

log = structlog.get_logger()

CPU_BACKENDS: tuple[type[AttentionBackend[Any]], ...] = (NativeAttention, CpuAttention, ReferenceAttention)
"""In the order in which `auto` prefers them on a CPU."""
FLASH_ATTN = "flash_attn"
"""Either version of flash-attn, whichever comes first and serves."""


def cuda_backends(*, is_split: bool = True) -> tuple[AttentionBackend[Any], ...]:
    """Return the back ends for CUDA devices in the order in which `auto` prefers them; the last it never takes.

    is_split: whether decodes and chunks of a hybrid batch go in two calls, or all rows in one.
    """
    return (
        Flash3Attention(is_split=is_split),
        Flash2Attention(is_split=is_split),
        TritonAttention(is_split=is_split),
        TorchPagedAttention(),
    )


def fitted(spec: AttentionSpec, backend: AttentionBackend[Any]) -> AttentionSpec:
    """Return spec with the block size that backend likes best, where spec says 0."""
    if spec.block_size:
        return spec
    return replace(spec, block_size=FA2_PAGE_MULTIPLE if isinstance(backend, Flash2Attention) else DEFAULT_BLOCK_SIZE)


def choose_backend(
    name: str, spec: AttentionSpec, *, is_split: bool = True, must_be_invariant: bool = False
) -> AttentionBackend[Any]:
    """Return the back end of that name, or with `auto` the first that can serve spec; log which and why.

    A block size of 0 is each back end's own choice, see fitted. On a CUDA device a back end must also pass its smoke
    test; there must_be_invariant leaves one, Triton's. On a CPU what has been chosen says whether it is.

    Raises:
        BackendUnavailable: If the named one cannot, or with `auto` none can. A choice never falls back in silence.
    """
    if torch.device(spec.device).type == "cuda":
        backends = (InvariantTritonAttention(),) if must_be_invariant else cuda_backends(is_split=is_split)
        return _choose(name, backends, spec, smoke_test)
    return _choose(name, tuple(backend_type() for backend_type in CPU_BACKENDS), spec, lambda backend, spec: None)


def _choose(
    name: str,
    backends: tuple[AttentionBackend[Any], ...],
    spec: AttentionSpec,
    test: Callable[[AttentionBackend[Any], AttentionSpec], str | None],
) -> AttentionBackend[Any]:
    skipped: list[str] = []
    for backend in backends:
        if name != backend.name and not _is_meant(name, backend):
            continue
        mine = fitted(spec, backend)
        probe = backend.probe(mine)
        problem = test(backend, mine) if probe.is_available else probe.detail
        if problem is None:
            log.info("attention_chosen", name=backend.name, asked_for=name, detail=probe.detail, skipped=skipped)
            return backend
        skipped.append(f"{backend.name}: {problem}")
    if not skipped:
        known = ", ".join(backend.name for backend in backends)
        raise BackendUnavailable(f"no attention back end {name!r} for {spec.device}; known: {known}")
    raise BackendUnavailable(f"attention back end {name!r} is unavailable: {'; '.join(skipped)}")


def _is_meant(name: str, backend: AttentionBackend[Any]) -> bool:
    """Whether a name that stands for several back ends includes this one."""
    if name == FLASH_ATTN:
        return isinstance(backend, Flash3Attention | Flash2Attention)
    # What gathers every key of every token would serve, and no stream would thank it.
    return name == "auto" and not isinstance(backend, TorchPagedAttention)
