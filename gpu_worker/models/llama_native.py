"""Llama's layers, and those of families that do the same, on our own CPU kernels: what models/llama.py computes, as
one list of operations.

Activations are float32 whatever the weights are, so of bfloat16 only the weights' and the KV cache's rounding is left.
"""

import torch
from torch import Tensor

from gpu_worker.kernels.library import Engine, Epilogue, PackedMatrix, WeightType
from gpu_worker.kernels.program import FlatRows, HeadShape, Program
from gpu_worker.kv_cache import KvCache
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import ModelWeights
from gpu_worker.models.rope import rotation_table


class NativeLlama:
    """A model packed for the kernels, with buffers for the largest batch. Used by one thread at a time."""

    def __init__(
        self,
        engine: Engine,
        config: ModelConfig,
        weights: ModelWeights,
        kv_cache: KvCache,
        *,
        weight_type: WeightType,
        max_model_len: int,
        max_tokens: int,
        max_samples: int,
    ) -> None:
        """Pack weights, which are not needed afterwards."""
        self._engine = engine
        self._max_model_len = max_model_len
        self._vocab_size = config.vocab_size
        self._num_blocks = kv_cache.num_blocks
        self._weight_type = weight_type
        self.program = Program(max_tokens, max_samples)
        self._logits = self._build(config, weights, kv_cache, max_model_len)

    def forward(self, batch: FlatRows, operation_ns: Tensor | None = None) -> Tensor:
        """Compute one flat batch: store its KV, and return logits where a token is to be sampled.

        Returns:
            (samples, vocab) float32. A buffer: the next call writes over it.

        Raises:
            IndexError: If the batch names a position, token or block that does not exist.
        """
        self._check(batch)
        self.program.run(self._engine, batch, operation_ns)
        return self._logits[: len(batch.sampled)]

    def _build(self, config: ModelConfig, weights: ModelWeights, kv_cache: KvCache, max_model_len: int) -> Tensor:
        """Write the program; return the buffer that its logits go to."""
        program, eps = self.program, config.rms_norm_eps
        cosine, sine = rotation_table(config.rope, config.head_dim, max_model_len, torch.float32)
        head = self._pack(weights.head)
        embedding = head if weights.head is weights.embedding else self._pack(weights.embedding)
        width = config.num_heads * config.head_dim
        hidden = program.token_buffer(config.hidden_size)
        projected = program.token_buffer(width + 2 * config.num_kv_heads * config.head_dim)
        attended = program.token_buffer(width)
        activated = program.token_buffer(config.intermediate_size)
        program.embed(embedding, hidden)
        for index, layer in enumerate(weights.layers):
            keys, values = kv_cache.keys[index], kv_cache.values[index]
            heads = HeadShape(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                window=config.window_of(index) or 0,
            )
            program.linear(
                "query key value",
                self._pack(layer.query_key_value),
                hidden,
                projected,
                norm=layer.attention_norm.float(),
                eps=eps,
            )
            program.rotate_and_store(projected, cosine, sine, keys, values, heads)
            program.attend(projected, attended, keys, values, heads)
            is_last = index == config.num_layers - 1
            if is_last:
                # Only the KV of the last layer concerns tokens that are not sampled.
                every_hidden, hidden = hidden, program.sample_buffer(config.hidden_size)
                every_attended, attended = attended, program.sample_buffer(width)
                program.gather(every_hidden, hidden)
                program.gather(every_attended, attended)
            program.linear(
                "attention output",
                self._pack(layer.attention_output, Epilogue.ADD),
                attended,
                hidden,
                is_sampled=is_last,
            )
            program.linear(
                "gate up",
                self._pack(layer.gate_up, Epilogue.SILU_MUL),
                hidden,
                activated,
                norm=layer.mlp_norm.float(),
                eps=eps,
                is_sampled=is_last,
            )
            program.linear("down", self._pack(layer.down, Epilogue.ADD), activated, hidden, is_sampled=is_last)
        logits = program.sample_buffer(config.vocab_size)
        program.linear("head", head, hidden, logits, norm=weights.final_norm.float(), eps=eps, is_sampled=True)
        return logits

    def _check(self, batch: FlatRows) -> None:
        """Kernels look up without asking; what they would read out of bounds is our own bug, and must not pass."""
        for what, indices, end in (
            ("position", batch.positions, self._max_model_len),
            ("token", batch.token_ids, self._vocab_size),
            ("block", batch.block_tables, self._num_blocks),
        ):
            least, most = indices.aminmax()
            if int(least) < 0 or int(most) >= end:
                raise IndexError(f"{what}s {int(least)} to {int(most)} of a batch are not all below {end}")

    def _pack(self, weights: Tensor, epilogue: Epilogue = Epilogue.STORE) -> PackedMatrix:
        return self._engine.kernels.pack(weights, self._weight_type, epilogue)
