"""A forward pass as a list of operations over buffers of float32, made once and run once per iteration."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_worker.kernels.library import (
    AttendStruct,
    AttentionShapeStruct,
    BatchStruct,
    EmbedStruct,
    Engine,
    GatherStruct,
    Kind,
    KvPoolStruct,
    LinearStruct,
    OperationStruct,
    PackedMatrix,
    RotateAndStoreStruct,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The heads of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # a multiple of 16
    window: int = 0  # how many keys a query sees at most, its own included; 0: all
    scale: float | None = None  # of scores; None is 1 / sqrt(head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRows:
    """One flat hybrid batch; see gpu_worker.attention.base.BatchLayout for what its rows are."""

    token_ids: Tensor  # (tokens,) int64
    positions: Tensor  # (tokens,) int64
    slots: Tensor  # (tokens,) int64, where in the pool each token's KV goes
    sampled: Tensor  # (samples,) int64, indices into the batch
    query_lens: Tensor  # (rows,) int32
    kv_lens: Tensor  # (rows,) int32
    block_tables: Tensor  # (rows, longest) int64

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())


class Program:
    """Operations in the order in which they run. Tensors given to it are kept, and must not move.

    Buffers are (rows, width) float32 with room for the largest batch. An operation runs on all tokens of a batch, or
    with is_sampled on the rows that gather has taken together.
    """

    def __init__(self, max_tokens: int, max_samples: int) -> None:
        self.max_tokens = max_tokens
        self.max_samples = max_samples
        self.names: list[str] = []  # of the operations, for the benchmark's table
        self._operations: list[OperationStruct] = []
        self._array: Any = None
        self._kept: list[Any] = []

    def token_buffer(self, width: int) -> Tensor:
        """Return a buffer with a row for every token. The system gives memory as rows are first used."""
        return self._keep(torch.empty(self.max_tokens, width))

    def sample_buffer(self, width: int) -> Tensor:
        """Return a buffer with a row for every sampled token."""
        return self._keep(torch.empty(self.max_samples, width))

    def embed(self, matrix: PackedMatrix, output: Tensor, *, multiplier: float = 1.0) -> None:
        """output = the tokens' rows of a packed (vocab, hidden) matrix."""
        self._add(
            Kind.EMBED,
            "embed",
            EmbedStruct(
                weights=self._pointer(matrix.packed),
                scales=self._pointer(matrix.scales),
                output=self._pointer(output),
                multiplier=multiplier,
                weight_type=matrix.weight_type,
                hidden_size=matrix.inputs,
            ),
        )

    def linear(
        self,
        name: str,
        matrix: PackedMatrix,
        x: Tensor,
        output: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        is_sampled: bool = False,
    ) -> None:
        """output = epilogue(norm(x) W^T + bias), the norm being RMS with these weights, or none."""
        self._add(
            Kind.LINEAR,
            name,
            LinearStruct(
                input=self._pointer(x),
                input_stride=x.stride(0),
                output=self._pointer(output),
                output_stride=output.stride(0),
                weights=self._pointer(matrix.packed),
                scales=self._pointer(matrix.scales),
                bias=self._pointer(bias),
                norm=self._pointer(norm),
                eps=eps,
                inputs=matrix.inputs,
                outputs=matrix.outputs,
                weight_type=matrix.weight_type,
                epilogue=matrix.epilogue,
            ),
            is_sampled=is_sampled,
        )

    def rotate_and_store(
        self,
        projected: Tensor,
        cosine: Tensor,
        sine: Tensor,
        keys: Tensor,
        values: Tensor,
        heads: HeadShape,
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Turn queries and keys of (tokens, all heads * head_dim) in place, after their norms; store keys, values."""
        self._add(
            Kind.ROTATE_AND_STORE,
            "rotate and store",
            RotateAndStoreStruct(
                projected=self._pointer(projected),
                stride=projected.stride(0),
                cosine=self._pointer(cosine),
                sine=self._pointer(sine),
                query_norm=self._pointer(query_norm),
                key_norm=self._pointer(key_norm),
                eps=eps,
                pool=self._pool(keys, values),
                shape=_shape_of(heads),
            ),
        )

    def attend(self, queries: Tensor, output: Tensor, keys: Tensor, values: Tensor, heads: HeadShape) -> None:
        """output = attention of rotated queries, (tokens, at least heads * head_dim), over the pool.

        keys and values are (num_blocks, block_size, kv_heads, head_dim) of float32 or bfloat16, with any strides but
        that a value's dimensions lie side by side.
        """
        self._add(
            Kind.ATTEND,
            "attend",
            AttendStruct(
                queries=self._pointer(queries),
                query_stride=queries.stride(0),
                output=self._pointer(output),
                output_stride=output.stride(0),
                pool=self._pool(keys, values),
                shape=_shape_of(heads),
            ),
        )

    def gather(self, x: Tensor, output: Tensor) -> None:
        """output = the rows of x that are sampled, together."""
        self._add(
            Kind.GATHER,
            "gather",
            GatherStruct(
                input=self._pointer(x),
                output=self._pointer(output),
                input_stride=x.stride(0),
                output_stride=output.stride(0),
                size=output.shape[1],
            ),
            is_sampled=True,
        )

    def run(self, engine: Engine, batch: FlatRows, operation_ns: Tensor | None = None) -> None:
        """Run all operations on a batch, without the interpreter's lock.

        Args:
            engine: The threads.
            batch: At least one token; at most as many as the buffers hold.
            operation_ns: (operations,) int64; the time that each took is added.
        """
        num_tokens, num_sampled = batch.num_tokens, len(batch.sampled)
        assert 1 <= num_tokens <= self.max_tokens, (num_tokens, self.max_tokens)
        assert num_sampled <= self.max_samples, (num_sampled, self.max_samples)
        assert batch.block_tables.is_contiguous(), "tables are read row by row"
        if self._array is None:
            self._array = (OperationStruct * len(self._operations))(*self._operations)
        struct = BatchStruct(
            num_tokens=num_tokens,
            num_rows=len(batch.query_lens),
            num_sampled=num_sampled,
            table_stride=batch.block_tables.shape[1],
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            sampled=batch.sampled.data_ptr(),
            query_lens=batch.query_lens.data_ptr(),
            kv_lens=batch.kv_lens.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
        )
        engine.kernels.functions.legato_run(
            engine.handle,
            ctypes.cast(self._array, ctypes.c_void_p),
            len(self._operations),
            ctypes.addressof(struct),
            None if operation_ns is None else operation_ns.data_ptr(),
        )

    def _add(self, kind: Kind, name: str, struct: ctypes.Structure, *, is_sampled: bool = False) -> None:
        operation = OperationStruct(kind=kind, is_sampled_rows=is_sampled)
        setattr(operation.of, kind.name.lower(), struct)
        self._operations.append(operation)
        self.names.append(name)
        self._array = None

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        return tensor

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.dtype in (torch.float32, torch.uint8), f"operations work on float32, not {tensor.dtype}"
        assert tensor.stride(-1) == 1, "rows are read side by side"
        return self._keep(tensor).data_ptr()

    def _pool(self, keys: Tensor, values: Tensor) -> KvPoolStruct:
        assert keys.dtype == values.dtype, (keys.dtype, values.dtype)
        assert keys.dtype in (torch.float32, torch.bfloat16), keys.dtype
        assert keys.shape == values.shape, (keys.shape, values.shape)
        assert values.stride(3) == 1, "a value's dimensions lie side by side"
        self._kept += (keys, values)
        key_block, key_token, key_head, key_dim = keys.stride()
        value_block, value_token, value_head, _ = values.stride()
        return KvPoolStruct(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            is_bfloat16=keys.dtype == torch.bfloat16,
            block_size=keys.shape[1],
            key_block=key_block,
            key_head=key_head,
            key_dim=key_dim,
            key_token=key_token,
            value_block=value_block,
            value_head=value_head,
            value_token=value_token,
        )


def _shape_of(heads: HeadShape) -> AttentionShapeStruct:
    assert heads.head_dim % 16 == 0, f"heads of {heads.head_dim} are no multiple of 16"
    return AttentionShapeStruct(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        window=heads.window,
        scale=heads.head_dim**-0.5 if heads.scale is None else heads.scale,
    )
