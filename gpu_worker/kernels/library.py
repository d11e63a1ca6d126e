"""The built kernels as Python sees them: structures of source/program.cpp, packing, and the team of threads."""

import ctypes
import os
import weakref
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import structlog
import torch
from torch import Tensor

from gpu_worker.kernels.build import InstructionSet, KernelsUnavailable, build, usable_instruction_sets
from gpu_worker.memory import Arena

log = structlog.get_logger()

KernelChoice = Literal["auto", "off"] | InstructionSet


class WeightType(IntEnum):
    """How packed weights are kept. Sums are float32 in any case."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2  # with a scale for each output


class Epilogue(IntEnum):
    """What a matrix product does with its result y."""

    STORE = 0
    ADD = 1  # output + y
    SILU_MUL = 2  # silu(first half of y) * second half


class Kind(IntEnum):
    """Which member of an Operation's union holds."""

    EMBED = 0
    LINEAR = 1
    ROTATE_AND_STORE = 2
    ATTEND = 3
    GATHER = 4


class KvPoolStruct(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("is_bfloat16", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("key_block", ctypes.c_int64),
        ("key_head", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("key_token", ctypes.c_int64),
        ("value_block", ctypes.c_int64),
        ("value_head", ctypes.c_int64),
        ("value_token", ctypes.c_int64),
    )


class AttentionShapeStruct(ctypes.Structure):
    _fields_ = (
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class EmbedStruct(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("multiplier", ctypes.c_float),
        ("weight_type", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
    )


class LinearStruct(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("output_stride", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("weight_type", ctypes.c_int32),
        ("epilogue", ctypes.c_int32),
    )


class RotateAndStoreStruct(ctypes.Structure):
    _fields_ = (
        ("projected", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("pool", KvPoolStruct),
        ("shape", AttentionShapeStruct),
    )


class AttendStruct(ctypes.Structure):
    _fields_ = (
        ("queries", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("output_stride", ctypes.c_int64),
        ("pool", KvPoolStruct),
        ("shape", AttentionShapeStruct),
    )


class GatherStruct(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
    )


class _OperationUnion(ctypes.Union):
    _fields_ = (
        ("embed", EmbedStruct),
        ("linear", LinearStruct),
        ("rotate_and_store", RotateAndStoreStruct),
        ("attend", AttendStruct),
        ("gather", GatherStruct),
    )


class OperationStruct(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("is_sampled_rows", ctypes.c_int32), ("of", _OperationUnion))


class BatchStruct(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("num_sampled", ctypes.c_int32),
        ("table_stride", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("sampled", ctypes.c_void_p),
        ("query_lens", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """Weights as the kernels read them. Only the library that packed them can read them: panels have its width."""

    outputs: int
    inputs: int
    weight_type: WeightType
    epilogue: Epilogue
    packed: Tensor  # bytes
    scales: Tensor | None  # (outputs,) float32, INT8 only

    @property
    def num_bytes(self) -> int:
        return self.packed.numel()


class Kernels:
    """One built library."""

    def __init__(self, instruction_set: InstructionSet) -> None:
        """Build or find the library, and load it.

        Raises:
            KernelsUnavailable: If that cannot be done; with the reason.
        """
        self.instruction_set = instruction_set
        self._arena = Arena()
        path = build(instruction_set)
        try:
            self.functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error
        self._declare()
        if refusal := self.functions.legato_prepare():
            raise KernelsUnavailable(
                f"the system does not let kernels for {instruction_set} run: {os.strerror(refusal)}"
            )
        size = self.functions.legato_operation_size()
        assert size == ctypes.sizeof(OperationStruct), "library.py and source/program.cpp disagree on an operation"

    def rounds_inputs(self, weight_type: WeightType) -> bool:
        """Whether a product by such weights rounds its inputs to bfloat16; its sums are float32 all the same. So does
        attention, with queries and softmax weights, over a pool of that type."""
        if self.instruction_set == "amx":
            return weight_type is not WeightType.FLOAT32
        return self.instruction_set == "avx512bf16" and weight_type is WeightType.BFLOAT16

    def pack(self, weights: Tensor, weight_type: WeightType, epilogue: Epilogue = Epilogue.STORE) -> PackedMatrix:
        """Pack (outputs, inputs) weights of float32 or bfloat16.

        The epilogue decides the order of the outputs: for SILU_MUL, gate's and up's rows come one under another.
        """
        assert weights.dtype in (torch.float32, torch.bfloat16), weights.dtype
        weights = weights.contiguous()
        outputs, inputs = weights.shape
        num_bytes = self.functions.legato_packed_bytes(outputs, inputs, weight_type, epilogue)
        packed = self._arena.take(num_bytes)
        scales = torch.empty(outputs) if weight_type is WeightType.INT8 else None
        self.functions.legato_pack(
            weights.data_ptr(),
            WeightType.BFLOAT16 if weights.dtype == torch.bfloat16 else WeightType.FLOAT32,
            outputs,
            inputs,
            weight_type,
            epilogue,
            packed.data_ptr(),
            None if scales is None else scales.data_ptr(),
        )
        return PackedMatrix(
            outputs=outputs, inputs=inputs, weight_type=weight_type, epilogue=epilogue, packed=packed, scales=scales
        )

    def _declare(self) -> None:
        """Tell ctypes the types, without which it would cut pointers to 32 bits."""
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        for name, result, arguments in (
            ("legato_prepare", int32, ()),
            ("legato_engine_new", pointer, (int32,)),
            ("legato_engine_free", None, (pointer,)),
            ("legato_run", None, (pointer, pointer, int32, pointer, pointer)),
            ("legato_operation_size", int64, ()),
            ("legato_packed_bytes", int64, (int32, int32, int32, int32)),
            ("legato_pack", None, (pointer, int32, int32, int32, int32, int32, pointer, pointer)),
        ):
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments


def find_kernels(choice: KernelChoice) -> Kernels | None:
    """Return the kernels of this choice; None if they are off, or if `auto` finds that none can be built here. It takes
    the fastest that can: a compiler may be older than the processor.

    Raises:
        KernelsUnavailable: If a named instruction set cannot be had. A choice never falls back in silence.
    """
    if choice == "off":
        log.info("kernels_off")
        return None
    usable = usable_instruction_sets()
    if choice not in ("auto", *usable):
        raise KernelsUnavailable(f"kernels for {choice} cannot run here; this machine runs {', '.join(usable)}")
    for name in usable if choice == "auto" else (choice,):
        try:
            kernels = Kernels(name)
        except KernelsUnavailable as error:
            if choice != "auto":
                raise
            log.warning("kernels_unavailable", instruction_set=name, detail=str(error))
        else:
            log.info("kernels_loaded", instruction_set=name, asked_for=choice)
            return kernels
    log.warning("kernels_missing", instead="plain torch, several times slower")
    return None


class Engine:
    """A team of threads and its working memory. One caller at a time; the calling thread is one of the team."""

    def __init__(self, kernels: Kernels, num_threads: int) -> None:
        assert num_threads >= 1, num_threads
        self.kernels = kernels
        self.num_threads = num_threads
        self.handle = kernels.functions.legato_engine_new(num_threads)
        # Threads of a library that outlives the interpreter's end would be killed at any point: join them before.
        weakref.finalize(self, kernels.functions.legato_engine_free, self.handle)
