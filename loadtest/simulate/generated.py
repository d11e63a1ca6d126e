"""Tables of kernel times for machines without measured ones: generated from the figures of a device.

They have the columns of the measured tables. Matrix products go in waves of tiles over the device's processors;
attention reads and multiplies at a constant rate. No fit: a plausible device, of another form than the predictor.
"""

import math
from collections.abc import Iterator

from common.cost.devices import Device

_TILE_ROWS = 128
_NUM_PROCESSORS = 108
_START_MS = 0.006
_HEADS = ((1, 1), (4, 1), (8, 1), (8, 2), (16, 2), (28, 4), (32, 4), (32, 8), (56, 8), (64, 8))
_LENGTHS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 65536)


def generated_rows(kind: str, device: Device) -> Iterator[dict[str, str]]:
    """Yield the rows of one table: gemm, attn_prefill, attn_decode or collectives."""
    match kind:
        case "gemm":
            yield from _products(device)
        case "attn_prefill":
            yield from _prefill(device)
        case "attn_decode":
            yield from _decode(device)
        case "collectives":
            yield from _collectives(device)
        case _:
            raise ValueError(f"no table {kind!r}")


def _products(device: Device) -> Iterator[dict[str, str]]:
    rows = (1, 8, 16, 32, 64, *range(128, 1025, 64), 1536, 2048, 3072, 4096, 8192)
    for outputs in _SIZES:
        for inputs in _SIZES[:-1]:
            for count in rows:
                tiles = math.ceil(count / _TILE_ROWS) * math.ceil(outputs / _TILE_ROWS)
                # A last wave that is not full takes as long as a full one.
                waves = max(1.0, math.ceil(tiles / _NUM_PROCESSORS * 4) / 4)
                per_wave = 2 * _TILE_ROWS * _TILE_ROWS * inputs * _NUM_PROCESSORS / (0.8 * device.flops_per_s)
                reading = 2 * (outputs * inputs + count * (inputs + outputs)) / (0.8 * device.bytes_per_s)
                latency_ms = _START_MS + 1e3 * max(waves * per_wave, reading)
                yield {"m": str(count), "n": str(outputs), "k": str(inputs), "latency_ms": f"{latency_ms:.5f}"}


def _prefill(device: Device) -> Iterator[dict[str, str]]:
    for heads, kv_heads in _HEADS:
        for length in _LENGTHS:
            operations = 2 * heads * 128 * length * (length + 1)
            latency_ms = 0.012 + 1e3 * operations / (0.5 * device.flops_per_s)
            yield {**_head_columns(heads, kv_heads), "batch_size": "1", "seq_len": str(length), **_ms(latency_ms)}


def _decode(device: Device) -> Iterator[dict[str, str]]:
    for heads, kv_heads in _HEADS:
        for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            for length in _LENGTHS:
                moved = 4 * kv_heads * 128 * length * size
                # Few and short rows do not fill the device.
                share = 0.85 * moved / (moved + 4e6)
                latency_ms = 0.015 + 1e3 * moved / (share * device.bytes_per_s)
                yield {
                    **_head_columns(heads, kv_heads),
                    "batch_size": str(size),
                    "context_len": str(length),
                    **_ms(latency_ms),
                }


def _collectives(device: Device) -> Iterator[dict[str, str]]:
    rate = device.link_bytes_per_s or 10e9
    for node in ("a100_dgx", "h100_dgx"):
        for workers in (2, 4, 8):
            for size in (2**power for power in range(10, 29, 2)):
                latency_ms = 0.015 + 1e3 * 2 * (workers - 1) / workers * size / rate
                yield {
                    "node": node,
                    "collective": "all_reduce",
                    "num_workers": str(workers),
                    "devices_per_node": str(workers),
                    "size_bytes": str(size),
                    "median_ms": f"{latency_ms:.5f}",
                }


def _head_columns(heads: int, kv_heads: int) -> dict[str, str]:
    return {"head_dim": "128", "num_heads": str(heads), "num_key_value_heads": str(kv_heads)}


def _ms(latency_ms: float) -> dict[str, str]:
    return {"latency_ms": f"{latency_ms:.5f}"}
