"""From options to a world: which devices, how much memory, what the scheduler is told."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from common.cost.devices import DEVICES, Device
from common.cost.fit import SavedFit
from common.cost.roofline import Roofline
from common.cost.shapes import SHAPES, ModelShape
from common.ids import InstanceId, WorkerId
from common.messages.cards import ModelCard, WorkerCard
from loadtest.simulate.device import EOS, SimulatedWorker, Stage
from loadtest.simulate.options import SimulateOptions
from loadtest.simulate.requests import Arrival, arrivals_of, load_workload
from loadtest.simulate.simulation import World
from loadtest.simulate.tables import TableTruth
from loadtest.simulate.truth import Disturbance, RooflineTruth, Truth
from services.scheduler.core import SchedulerCore
from services.scheduler.events import WorkerJoined
from services.scheduler.limits import Limits

DEFAULT_MODEL = "mistral-7b"
MEMORY_SHARE = 0.9
"""Of a device's memory, what weights and KV cache may take; the rest is for activations and the runtime."""
MAX_SCATTER = 20_000
"""Ratios of a recording that are kept as its scatter: the latest ones."""
MAX_MODEL_LEN = 1 << 20
"""Requests are as long as the trace says; the KV cache bounds them."""


class SavedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler has learned of a worker, as it stands in a file."""

    device_kind: str  # key of DEVICES
    shape: ModelShape
    tensor_parallel: int
    fit: SavedFit
    scatter: tuple[float, ...] = ()  # ratios of iterations' times to the fitted ones, in order; see recorded.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One worker's devices and what they hold."""

    device: Device
    shape: ModelShape
    tensor_parallel: int
    pipeline_parallel: int
    fit: SavedFit | None = None
    scatter: tuple[float, ...] = ()


def world_of(options: SimulateOptions, seed: int, targets_ms: tuple[float, ...] = ()) -> World:
    """Return a fresh world for one run.

    Args:
        options: The system and its load.
        seed: Of this run.
        targets_ms: Targets whose late gaps are counted beside that of the options.

    Raises:
        ValueError: If the options describe no system: an unknown device, a model that does not fit.
    """
    hardware = hardware_of(options)
    card = card_of(options, hardware)
    total_lens: dict[Any, int] | None = {} if options.max_tokens else None
    joining, workers = [], []
    stage = _stage_of(options, hardware)
    for index in range(options.workers):
        worker_id = WorkerId(InstanceId(f"worker-{index}"))
        disturbance = _disturbance_of(options, hardware, random.Random(f"{seed}:worker:{index}"))
        workers.append(SimulatedWorker(worker_id, [stage] * hardware.pipeline_parallel, disturbance, total_lens))
        joining.append(WorkerJoined(worker_id=worker_id, card=card, fit=hardware.fit))
    return World(
        core=SchedulerCore(limits_of(options)),
        joining=joining,
        workers=workers,
        arrivals=arrivals_for(options, seed),
        targets_ns=[int(1e6 * target_ms) for target_ms in (options.tbt_target_ms, *targets_ms)],
        seed=seed,
        num_warmup=options.num_warmup,
        declared_max_tokens=options.max_tokens or None,
        total_lens=total_lens,
        ring_delay_ns=int(1e6 * options.ring_delay_ms),
    )


def arrivals_for(options: SimulateOptions, seed: int) -> Iterator[Arrival]:
    """Return the requests of a run, the same ones each time."""
    workload = load_workload(options.workload, options.traces, seed)
    return arrivals_of(workload, options.arrivals, options.rate, options.requests, seed, burstiness=options.burstiness)


def limits_of(options: SimulateOptions) -> Limits:
    """Return the scheduler's settings."""
    return Limits(
        tbt_target_ns=int(1e6 * options.tbt_target_ms),
        late_share=options.late_share,
        ring_allowance_ns=int(1e6 * options.ring_allowance_ms),
        policy=options.policy,
        depth=options.depth or 2,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        queue_timeout_ns=int(1e9 * options.queue_timeout_s),
        fixed_token_budget=options.token_budget or None,
        max_batched_tokens=options.max_batched_tokens,
        overcommit=options.overcommit,
        has_prefix_cache=options.prefix_cache,
    )


def hardware_of(options: SimulateOptions) -> Hardware:
    """Raises ValueError for an unknown device or model."""
    if options.device in DEVICES:
        shape = shape_of(options.model or DEFAULT_MODEL)
        return Hardware(
            device=DEVICES[options.device], shape=shape, tensor_parallel=options.tp, pipeline_parallel=options.pp
        )
    path = Path(options.device).expanduser()
    if not path.is_file():
        raise ValueError(f"--device is {options.device!r}: neither a file nor one of {', '.join(DEVICES)}")
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=SavedDevice)
    except msgspec.DecodeError as error:
        raise ValueError(f"--device {path.name}: {error}") from error
    if saved.device_kind not in DEVICES:
        raise ValueError(f"--device {path.name}: no figures for its device kind {saved.device_kind!r}")
    if options.truth == "tables":
        raise ValueError("--truth tables and a saved fit: choose one")
    if options.model:
        raise ValueError(f"--model {options.model}: the fit {path.name} is of a model of its own")
    if options.tp not in (1, saved.tensor_parallel):
        raise ValueError(f"--tp is {options.tp}; the fit {path.name} is of {saved.tensor_parallel}")
    return Hardware(
        device=DEVICES[saved.device_kind],
        shape=saved.shape,
        tensor_parallel=saved.tensor_parallel,
        pipeline_parallel=options.pp,
        fit=saved.fit,
        scatter=saved.scatter,
    )


def shape_of(name_or_path: str) -> ModelShape:
    """Return the shape of a known model, or of a Hugging Face config.json.

    Raises:
        ValueError: If it is neither.
    """
    if name_or_path in SHAPES:
        return SHAPES[name_or_path]
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        raise ValueError(f"--model is {name_or_path!r}: neither a file nor one of {', '.join(SHAPES)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        num_bytes = 4 if config.get("torch_dtype", config.get("dtype")) == "float32" else 2
        return ModelShape(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            bytes_per_weight=num_bytes,
            bytes_per_kv=num_bytes,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--model {path.name} is no configuration of a model: {error!r}") from error


def kv_tokens_of(hardware: Hardware) -> int:
    """Return how many tokens' KV the memory of all devices of a worker holds beside the weights."""
    shape = hardware.shape
    weights = shape.bytes_per_weight * (shape.num_weights + shape.vocab_size * shape.hidden_size)
    num_devices = hardware.tensor_parallel * hardware.pipeline_parallel
    free = MEMORY_SHARE * hardware.device.memory_bytes * num_devices - weights
    if free < shape.kv_bytes_per_token:
        raise ValueError(
            f"{weights / 1e9:.0f} GB of weights leave no room for a KV cache on {num_devices} x "
            f"{hardware.device.name} ({hardware.device.memory_bytes / 1e9:.0f} GB each): raise --tp or --pp"
        )
    return int(free / shape.kv_bytes_per_token)


def card_of(options: SimulateOptions, hardware: Hardware) -> WorkerCard:
    """Return what the simulated worker says of itself."""
    num_blocks = (options.kv_tokens or kv_tokens_of(hardware)) // options.block_size
    if num_blocks < 1:
        raise ValueError(f"--kv-tokens {options.kv_tokens} is less than one block of {options.block_size}")
    return WorkerCard(
        model=ModelCard(
            name="simulated",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=hardware.shape.vocab_size,
            eos_token_ids=(EOS,),
        ),
        shape=hardware.shape,
        device="simulated",
        device_kind=hardware.device.name,
        tensor_parallel=hardware.tensor_parallel,
        pipeline_parallel=hardware.pipeline_parallel,
        dtype="bfloat16" if hardware.shape.bytes_per_weight == 2 else "float32",
        attention="none",
        is_batch_invariant=True,
        block_size=options.block_size,
        num_blocks=num_blocks,
        # Requests that have ended hold their slot until the plans in flight return.
        max_num_slots=2 * options.max_running,
        max_chunk_tokens=options.max_chunk_tokens,
    )


def _stage_of(options: SimulateOptions, hardware: Hardware) -> Stage:
    """One of the pipeline's stages; all are alike, but that only the last samples."""
    shape, device, num_stages = hardware.shape, hardware.device, hardware.pipeline_parallel
    part = msgspec.structs.replace(shape, num_layers=max(1, round(shape.num_layers / num_stages)))
    truth: Truth
    if options.truth == "tables":
        truth = _table_truth(part, device, hardware.tensor_parallel, options.profiles)
    else:
        truth = RooflineTruth(Roofline(part, device, hardware.tensor_parallel), hardware.fit)
    rate = device.link_bytes_per_s or device.bytes_per_s
    return Stage(
        truth=truth,
        send_ns_per_token=1e9 * shape.bytes_per_weight * shape.hidden_size / rate,
        send_start_ns=1e9 * device.link_start_s,
    )


# Tables say the same in every run; reading them takes as long as a short run.
_table_truth = lru_cache(maxsize=8)(TableTruth)


def _disturbance_of(options: SimulateOptions, hardware: Hardware, rng: random.Random) -> Disturbance:
    noise = options.noise
    if noise is None:
        # The mean of |x| over [-a, a] is a / 2, and a fit's error is the mean of its residuals.
        noise = 0.0 if hardware.fit is None or hardware.scatter else min(0.9, 2 * hardware.fit.error)
    return Disturbance(
        rng,
        noise=noise,
        scatter=hardware.scatter if options.noise is None else (),
        slowdown_at_ns=None if options.slowdown_at is None else int(1e9 * options.slowdown_at),
        slowdown=options.slowdown,
    )
