"""What a layer is made of besides attention: matrix products, and what lies between them.

Fused in Triton on a GPU, plain torch elsewhere; and a third kind whose sums have one order.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.models.decoder import rms_norm
from gpu_worker.models.rope import rotate


class Operations(Protocol):
    """One signature for the fused kernels and their plain twins. See gpu_worker.triton_kernels.elementwise."""

    is_batch_invariant: bool
    """Whether a row's results depend on nothing but that row, to the bit."""

    def linear(self, inputs: Tensor, weights: Tensor, output: Tensor | None = None) -> Tensor:
        """Return inputs, (rows, inputs), times the transpose of weights, (outputs, inputs); in output where given."""

    def rotate_and_store(
        self,
        projected: Tensor,
        *,
        positions: Tensor,
        slots: Tensor,
        cosine: Tensor,
        sine: Tensor,
        keys: Tensor,
        values: Tensor,
        num_heads: int,
    ) -> Tensor:
        """Turn queries and keys, store keys and values at slots, and return queries, (tokens, heads, head_dim)."""

    def add_and_norm(self, residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add to residual in place; return its RMS norm times weight."""

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, (tokens, width), of (tokens, 2 * width)."""


class TorchOperations:
    """The plain twins: what the kernels are tested against, and what a CPU runs."""

    is_batch_invariant = False

    def linear(self, inputs: Tensor, weights: Tensor, output: Tensor | None = None) -> Tensor:
        return torch.mm(inputs, weights.t(), out=output)

    def rotate_and_store(
        self,
        projected: Tensor,
        *,
        positions: Tensor,
        slots: Tensor,
        cosine: Tensor,
        sine: Tensor,
        keys: Tensor,
        values: Tensor,
        num_heads: int,
    ) -> Tensor:
        num_kv_heads, head_dim = keys.shape[2:]
        by_head = projected.view(len(projected), -1, head_dim)  # (tokens, heads + 2 * kv_heads, head_dim)
        num_turned = num_heads + num_kv_heads
        turned = rotate(by_head[:, :num_turned], cosine[positions].unsqueeze(1), sine[positions].unsqueeze(1))
        keys.flatten(0, 1).index_copy_(0, slots, turned[:, num_heads:])
        values.flatten(0, 1).index_copy_(0, slots, by_head[:, num_turned:])
        return turned[:, :num_heads]

    def add_and_norm(self, residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if added is not None:
            residual.add_(added)
        return rms_norm(residual, weight, eps)

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


class TritonOperations:
    """The fused kernels, between the matrix products that the device's own library has for each number of rows."""

    is_batch_invariant = False

    def __init__(self) -> None:
        # Here, not above: TRITON_INTERPRET must be set before, and triton must be there.
        from gpu_worker.triton_kernels import elementwise  # noqa: PLC0415

        self.rotate_and_store = elementwise.rotate_and_store
        self.add_and_norm = elementwise.add_and_norm
        self.silu_and_multiply = elementwise.silu_and_multiply

    def linear(self, inputs: Tensor, weights: Tensor, output: Tensor | None = None) -> Tensor:
        return torch.mm(inputs, weights.t(), out=output)


class InvariantOperations(TritonOperations):
    """The fused kernels, which look at one token each, and our own matrix products of one tile and one order."""

    is_batch_invariant = True

    def linear(self, inputs: Tensor, weights: Tensor, output: Tensor | None = None) -> Tensor:
        from gpu_worker.triton_kernels import invariant  # noqa: PLC0415  # As above.

        return invariant.linear(inputs, weights, output)


def operations_for(device: torch.device) -> Operations:
    """Return the fused kernels on a CUDA device, else the plain twins."""
    return TritonOperations() if device.type == "cuda" else TorchOperations()
