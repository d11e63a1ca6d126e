"""What of a model is on this device: its embedding, layers and head, or the part of them that a rank has."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.paged import PagedBatch
from gpu_worker.cuda.model import fused_layers, is_fusible
from gpu_worker.cuda.operations import Operations
from gpu_worker.kv_cache import KvCache
from gpu_worker.loading import LoadedModel
from gpu_worker.models.decoder import Attention, run_layers, scaled
from gpu_worker.parallel.group import Group
from gpu_worker.parallel.vocabulary import look_up


class DeviceForward:
    """Enqueues; never waits. Ranks of a stage call it alike, since their sums are part of it."""

    def __init__(
        self,
        model: LoadedModel,
        kv_cache: KvCache,
        backend: AttentionBackend[PagedBatch],
        operations: Operations,
        group: Group,
        vocab_size: int,
    ) -> None:
        """model is this rank's shard; vocab_size is the whole model's."""
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend
        self._operations = operations
        self._group = group
        self._vocab_size = vocab_size
        self._is_fused = is_fusible(model.family, model.config)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return what the first layer takes of tokens, (tokens, hidden)."""
        embedded = look_up(self._group, self._model.weights.embedding, token_ids, self._vocab_size)
        return scaled(self._model.config, embedded)

    def layers(
        self, batch: PagedBatch, hidden: Tensor, *, positions: Tensor, slots: Tensor, sampled: Tensor | None
    ) -> Tensor:
        """Take one flat batch through this stage's layers, and store its KV.

        Args:
            batch: For attention.
            hidden: (tokens, hidden), what the layers before have made of the tokens; may be written to.
            positions: (tokens,) int64, each token's place in its own request.
            slots: (tokens,) int64, where each token's KV goes.
            sampled: (samples,) int64, indices into the batch of what the head wants; None for all of it.

        Returns:
            What logits takes, (samples, hidden); before the last stage what the next stage takes, of all tokens.
        """
        model, is_last = self._model, self._group.layout.is_last_stage
        attend = {window: self._attention(batch, window) for window in model.config.windows or (None,)}
        if self._is_fused:
            return fused_layers(
                model.config,
                model.weights,
                self._kv_cache,
                self._operations,
                attend,
                hidden,
                positions=positions,
                slots=slots,
                sampled=sampled if is_last else None,
                reduce=self._group.reduce,
                is_last=is_last,
            )
        hidden = run_layers(
            model.family,
            model.config,
            model.weights,
            self._kv_cache,
            attend,
            hidden,
            positions=positions,
            slots=slots,
            sampled=sampled if is_last else None,
            reduce=self._group.reduce,
        )
        if not is_last:
            return hidden
        return model.family.norm(hidden, model.weights.final_norm, model.config.rms_norm_eps)

    def logits(self, hidden: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the logits of these rows, (rows, vocab), in the tensor that is given, if one is; (0, vocab) on those
        ranks of the last stage that do not sample."""
        if self._group.layout.tp == 1:
            return self._operations.linear(hidden, self._model.weights.head, into)
        own = self._operations.linear(hidden, self._model.weights.head)
        whole = self._group.gather(own, self._vocab_size) if len(hidden) else None
        if whole is None:
            return own.new_empty((0, self._vocab_size))
        return whole if into is None else into.copy_(whole)

    def _attention(self, batch: PagedBatch, window: int | None) -> Attention:
        """Return what layers with such a window call."""
        prepared = replace(batch, window=window, scale=self._model.config.attention_scale)
        return partial(_attend, self._backend, prepared)


def _attend(
    backend: AttentionBackend[PagedBatch], prepared: PagedBatch, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    return backend.attend(queries, keys, values, prepared)
