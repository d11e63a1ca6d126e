"""Attention by our own kernels. With this back end the whole forward pass is theirs (see gpu_worker.forward)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionSpec, BatchLayout, Probe
from gpu_worker.kernels.library import Engine
from gpu_worker.kernels.program import FlatRows, HeadShape, Program

HEAD_DIM_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class NativeBatch:
    """One iteration's rows, and the threads that will go through them."""

    engine: Engine
    heads: HeadShape
    rows: FlatRows


class NativeAttention:
    """One call over all rows of a hybrid batch. Where sums over keys are cut depends on positions, never on rows."""

    name = "native"
    is_batch_invariant = True
    block_size_rule = "any; a multiple of 16 is faster"

    def probe(self, spec: AttentionSpec) -> Probe:
        if spec.device != "cpu":
            return Probe(False, f"it runs on the CPU, not on {spec.device}")
        if spec.unlike_llama:
            return Probe(False, f"its program is made for Llama's layers; this model has {spec.unlike_llama}")
        if spec.kernels is None:
            return Probe(False, "the kernels are switched off or could not be built; the log says which")
        if spec.dtype not in (torch.float32, torch.bfloat16):
            return Probe(False, f"it takes float32 and bfloat16, not {spec.dtype}")
        if spec.head_dim % HEAD_DIM_MULTIPLE:
            return Probe(False, f"heads of {spec.head_dim} are no multiple of {HEAD_DIM_MULTIPLE}")
        return Probe(True, f"kernels for {spec.kernels.instruction_set}")

    def prepare(self, layout: BatchLayout, spec: AttentionSpec) -> NativeBatch:
        assert spec.kernels is not None, "probe has refused"
        nothing = torch.empty(0, dtype=torch.int64)
        return NativeBatch(
            engine=Engine(spec.kernels, torch.get_num_threads()),
            heads=HeadShape(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                window=spec.window or 0,
                scale=spec.scale,
            ),
            rows=FlatRows(
                token_ids=nothing,
                positions=nothing,
                slots=nothing,
                sampled=nothing,
                query_lens=torch.tensor(layout.query_lens, dtype=torch.int32),
                kv_lens=torch.tensor(layout.kv_lens, dtype=torch.int32),
                block_tables=layout.block_tables,
            ),
        )

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: NativeBatch) -> Tensor:
        program = Program(max_tokens=len(queries), max_samples=0)
        attended = program.token_buffer(queries[0].numel())
        program.attend(queries.float().flatten(1), attended, keys, values, prepared.heads)
        program.run(prepared.engine, prepared.rows)
        return attended.view(queries.shape).to(queries.dtype)
