"""One rank's part of a forward pass: a stage's layers on a share of the heads, and what lies at the stage's ends."""

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionBackend, AttentionSpec, bind
from gpu_worker.batch import FlatBatch
from gpu_worker.kv_cache import KvCache
from gpu_worker.loading import LoadedModel
from gpu_worker.models.decoder import head, run_layers, scaled
from gpu_worker.parallel.group import Group
from gpu_worker.parallel.vocabulary import look_up


class StageForward:
    """A gpu_worker.forward.Forward whose logits exist on the rank that samples alone; others return none."""

    def __init__(
        self,
        group: Group,
        model: LoadedModel,
        kv_cache: KvCache,
        backend: AttentionBackend[Any],
        spec: AttentionSpec,
        vocab_size: int,
    ) -> None:
        """model is this rank's shard, as are the heads in spec; vocab_size is the whole model's."""
        self._layout = group.layout
        self._group = group
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend
        self._spec = spec
        self._specs = {window: replace(spec, window=window) for window in model.config.windows or (None,)}
        self._vocab_size = vocab_size
        self.waited_ns = 0
        """Time spent waiting for the stage before, in all calls so far."""

    def __call__(self, batch: FlatBatch) -> Tensor:
        family, config, weights = self._model.family, self._model.config, self._model.weights
        is_last = self._layout.is_last_stage
        hidden = run_layers(
            family,
            config,
            weights,
            self._kv_cache,
            {window: bind(self._backend, batch.layout, spec) for window, spec in self._specs.items()},
            self._embed(batch.token_ids) if self._layout.is_first_stage else self._receive(len(batch.token_ids)),
            positions=batch.positions,
            slots=batch.slots,
            sampled=batch.sampled if is_last else None,
            reduce=self._group.reduce,
        )
        nothing = hidden.new_empty((0, self._vocab_size))
        if not is_last:
            self._group.send(hidden)
            return nothing
        if len(batch.sampled) == 0:
            return nothing
        logits = self._group.gather(head(family, config, weights, hidden), self._vocab_size)
        return nothing if logits is None else logits

    def _embed(self, token_ids: Tensor) -> Tensor:
        # Only the stage's first rank need know the tokens: the others take them from it.
        known = self._group.broadcast(token_ids)
        embedded = look_up(self._group, self._model.weights.embedding, known, self._vocab_size)
        return scaled(self._model.config, embedded)

    def _receive(self, num_tokens: int) -> Tensor:
        started_ns = time.monotonic_ns()
        hidden = torch.empty(num_tokens, self._model.config.hidden_size, dtype=self._spec.dtype)
        self._group.receive(hidden)
        self.waited_ns += time.monotonic_ns() - started_ns
        return hidden
