"""One rank's part of a forward pass: a stage's layers on a share of the heads, and what lies at the stage's ends."""

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.attention.base import AttentionBackend, AttentionSpec, bind
from gpu_worker.batch import FlatBatch
from gpu_worker.kv_cache import KvCache
from gpu_worker.loading import LoadedModel
from gpu_worker.models.decoder import head, run_layers, scaled
from gpu_worker.parallel.group import Group
from gpu_worker.parallel.layout import Layout


class StageForward:
    """A gpu_worker.forward.Forward whose logits exist on the rank that samples alone; others return none."""

    def __init__(
        self,
        layout: Layout,
        group: Group,
        model: LoadedModel,
        kv_cache: KvCache,
        backend: AttentionBackend[Any],
        spec: AttentionSpec,
        vocab_size: int,
    ) -> None:
        """model is this rank's shard, as are the heads in spec; vocab_size is the whole model's."""
        self._layout = layout
        self._group = group
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend
        self._spec = spec
        self._specs = {window: replace(spec, window=window) for window in model.config.windows or (None,)}
        self._vocab_size = vocab_size
        self._words = layout.columns(vocab_size)
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
        return scaled(self._model.config, self._look_up(token_ids))

    def _look_up(self, token_ids: Tensor) -> Tensor:
        """Return the tokens' embeddings, (tokens, hidden). Only the stage's first rank need know the tokens: the
        others take them from it."""
        embedding = self._model.weights.embedding  # (words, hidden)
        if self._layout.tp == 1:
            return functional.embedding(token_ids, embedding)
        local = self._group.broadcast(token_ids) - self._words.start
        is_here = (local >= 0) & (local < len(self._words))
        # Each token is some rank's: of the others the sum has zeros.
        found = functional.embedding(torch.where(is_here, local, 0), embedding)
        return self._group.reduce(found * is_here.unsqueeze(1))

    def _receive(self, num_tokens: int) -> Tensor:
        started_ns = time.monotonic_ns()
        hidden = self._group.receive((num_tokens, self._model.config.hidden_size), self._spec.dtype)
        self.waited_ns += time.monotonic_ns() - started_ns
        return hidden
