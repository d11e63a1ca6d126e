"""The terms of an iteration's time, by the rates of the device and the shape of the model.

A matrix product takes the p-norm of its bytes' and its operations' time (Device.gemm_norm). Linear layers take what
reading the weights takes until their operations take longer, so a decode batch has room for prefill tokens that cost
next to nothing.
"""

from functools import lru_cache

from common.cost.devices import Device
from common.cost.load import Load
from common.cost.shapes import ModelShape

Terms = tuple[float, float, float, float, float, float]
"""Nanoseconds of: the iteration itself, linear layers, elementwise work, prefill attention, decode attention, head."""

TERM_NAMES = ("constant", "linear", "elementwise", "prefill_attention", "decode_attention", "head")

_CACHED_SIZES = 1 << 14


class Roofline:
    """Terms of any load on one device (or tensor-parallel group of devices) that holds one model."""

    def __init__(self, shape: ModelShape, device: Device, tensor_parallel: int = 1) -> None:
        self.shape = shape
        self.device = device
        self.tensor_parallel = tensor_parallel
        heads = shape.num_heads / tensor_parallel
        kv_heads = max(1.0, shape.num_kv_heads / tensor_parallel)
        ff = shape.intermediate_size / tensor_parallel
        hidden, head_dim = shape.hidden_size, shape.head_dim
        # (outputs, inputs) of the four matrix products of a layer, on one device.
        self._gemms = (
            ((heads + 2 * kv_heads) * head_dim, hidden),
            (hidden, heads * head_dim),
            (2 * ff, hidden),
            (hidden, ff),
        )
        per_s = 1e9 * shape.num_layers
        self._pair_ns = per_s * 2 * heads * head_dim / (device.prefill_flops_share * device.flops_per_s)
        prefill_rate = device.prefill_bytes_share * device.bytes_per_s
        self._query_ns = per_s * 2 * shape.bytes_per_kv * heads * head_dim / prefill_rate
        self._key_ns = per_s * 2 * shape.bytes_per_kv * kv_heads * head_dim / prefill_rate
        self._prefill_start_ns = per_s * device.prefill_start_s
        self._decode_key_ns = (
            per_s * 2 * shape.bytes_per_kv * kv_heads * head_dim / (device.decode_bytes_share * device.bytes_per_s)
        )
        self._decode_row_ns = per_s * device.decode_row_s
        self._decode_start_ns = per_s * device.decode_start_s
        self._constant_ns = 1e9 * device.iteration_start_s
        self._elementwise_ns = (
            per_s
            * shape.bytes_per_weight
            * (7 * hidden + 2 * (heads + kv_heads) * head_dim + 3 * ff)
            / (device.elementwise_bytes_share * device.bytes_per_s)
        )
        self._elementwise_start_ns = per_s * 5 * device.elementwise_start_s
        self._head_row_ns = 1e9 * 8 * shape.vocab_size / tensor_parallel / (0.5 * device.bytes_per_s)
        self._linear_ns = lru_cache(maxsize=_CACHED_SIZES)(self._linear)
        self._head_ns = lru_cache(maxsize=_CACHED_SIZES)(self._head)

    def terms(self, load: Load) -> Terms:
        """Return the terms of the iteration's time. Two microseconds: planning asks it ten times for a chunk."""
        prefill = decode = 0.0
        if load.num_chunks:
            prefill = (
                self._prefill_start_ns
                + self._pair_ns * load.prefill_pairs
                + self._query_ns * load.prefill_tokens
                + self._key_ns * load.prefill_keys
            )
        if load.num_decodes:
            decode = (
                self._decode_start_ns + self._decode_key_ns * load.decode_keys + self._decode_row_ns * load.num_decodes
            )
        return (
            self._constant_ns,
            self._linear_ns(load.num_tokens),
            self._elementwise_start_ns + self._elementwise_ns * load.num_tokens,
            prefill,
            decode,
            self._head_ns(load.num_sampled),
        )

    def time_ns(self, load: Load) -> float:
        """The whole iteration, uncorrected."""
        return sum(self.terms(load))

    def _linear(self, num_tokens: int) -> float:
        if num_tokens == 0:
            return 0.0
        layer = sum(self._gemm_ns(num_tokens, outputs, inputs) for outputs, inputs in self._gemms)
        return self.shape.num_layers * (layer + self._all_reduces_ns(num_tokens))

    def _gemm_ns(self, rows: int, outputs: float, inputs: float) -> float:
        device, size = self.device, self.shape.bytes_per_weight
        moved = size * (outputs * inputs + rows * inputs + rows * outputs)
        bytes_s = moved / (device.gemm_bytes_share * device.bytes_per_s)
        flops_s = 2 * rows * outputs * inputs / (device.gemm_flops_share * device.flops_per_s)
        norm = device.gemm_norm
        return float(1e9 * (device.gemm_start_s + (bytes_s**norm + flops_s**norm) ** (1 / norm)))

    def _all_reduces_ns(self, num_tokens: int) -> float:
        if self.tensor_parallel == 1 or not self.device.link_bytes_per_s:
            return 0.0
        moved = 2 * (self.tensor_parallel - 1) / self.tensor_parallel * 2 * num_tokens * self.shape.hidden_size
        return 1e9 * 2 * (self.device.link_start_s + moved / self.device.link_bytes_per_s)

    def _head(self, num_sampled: int) -> float:
        if num_sampled == 0:
            return 0.0
        shape = self.shape
        product = self._gemm_ns(num_sampled, shape.vocab_size / self.tensor_parallel, shape.hidden_size)
        return product + self._head_row_ns * num_sampled
