"""Figures of devices: peak rates, and how much of them kernels reach."""

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or one CPU.

    Efficiencies are fractions of the peak that a fit of the p-norm roofline gave to measured kernels: NVIDIA
    AIConfigurator's tables of matrix products and attention (vLLM 0.14 on the A100, 0.24 on H100 and H200).
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    gemm_bytes_share: float
    gemm_flops_share: float
    gemm_start_s: float  # a matrix product that computes nothing
    gemm_norm: float  # of bytes time and flops time: 1 adds them, infinity takes the larger
    prefill_flops_share: float
    prefill_bytes_share: float
    prefill_start_s: float
    decode_bytes_share: float
    decode_start_s: float
    decode_row_s: float  # each further row
    elementwise_bytes_share: float
    elementwise_start_s: float
    iteration_start_s: float  # preparing inputs, launching, sampling
    tile_tokens: int = 64  # matrix products take their rows in such steps; 1: a row more takes a row's time more
    link_bytes_per_s: float = 0.0  # of an all-reduce between neighbours
    link_start_s: float = 0.0


DEVICES = {
    "a100-80": Device(
        name="a100-80",
        flops_per_s=312e12,
        bytes_per_s=2.039e12,
        memory_bytes=80e9,
        gemm_bytes_share=0.76,
        gemm_flops_share=0.85,
        gemm_start_s=5.8e-6,
        gemm_norm=1.65,
        prefill_flops_share=0.59,
        prefill_bytes_share=0.39,
        prefill_start_s=12.4e-6,
        decode_bytes_share=0.71,
        decode_start_s=18e-6,
        decode_row_s=57e-9,
        elementwise_bytes_share=0.45,
        elementwise_start_s=5e-6,
        iteration_start_s=1.3e-3,
        link_bytes_per_s=190e9,
        link_start_s=10e-6,
    ),
    "h100": Device(
        name="h100",
        flops_per_s=989e12,
        bytes_per_s=3.35e12,
        memory_bytes=80e9,
        gemm_bytes_share=0.88,
        gemm_flops_share=0.81,
        gemm_start_s=3.7e-6,
        gemm_norm=3.2,
        prefill_flops_share=0.70,
        prefill_bytes_share=0.41,
        prefill_start_s=12.7e-6,
        decode_bytes_share=0.91,
        decode_start_s=11.6e-6,
        decode_row_s=45e-9,
        elementwise_bytes_share=0.47,
        elementwise_start_s=4e-6,
        iteration_start_s=1.0e-3,
        link_bytes_per_s=300e9,
        link_start_s=7e-6,
    ),
    "h200": Device(
        name="h200",
        flops_per_s=989e12,
        bytes_per_s=4.8e12,
        memory_bytes=141e9,
        gemm_bytes_share=0.83,
        gemm_flops_share=0.81,
        gemm_start_s=4.0e-6,
        gemm_norm=3.5,
        prefill_flops_share=0.68,
        prefill_bytes_share=0.31,
        prefill_start_s=12.6e-6,
        decode_bytes_share=0.86,
        decode_start_s=11.5e-6,
        decode_row_s=48e-9,
        elementwise_bytes_share=0.49,
        elementwise_start_s=4e-6,
        iteration_start_s=1.0e-3,
        link_bytes_per_s=330e9,
        link_start_s=6e-6,
    ),
    # Two cores of a server CPU: a place to start from. A worker's own measurements correct it within seconds.
    "cpu": Device(
        name="cpu",
        flops_per_s=200e9,
        bytes_per_s=25e9,
        memory_bytes=24e9,
        gemm_bytes_share=0.8,
        gemm_flops_share=0.7,
        gemm_start_s=20e-6,
        gemm_norm=1.5,
        prefill_flops_share=0.3,
        prefill_bytes_share=0.3,
        prefill_start_s=50e-6,
        decode_bytes_share=0.3,
        decode_start_s=50e-6,
        decode_row_s=5e-6,
        elementwise_bytes_share=0.3,
        elementwise_start_s=20e-6,
        iteration_start_s=2e-3,
        tile_tokens=1,
    ),
}
