"""Iterations on a device, launched one ahead: the host prepares the next while the device computes this one.

The host waits once an iteration, for an event, when its tokens are wanted. Until then it has only enqueued work:
nothing that it needs to know depends on a value that the device computed.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.paged import PagedBatch
from gpu_worker.cuda.buffers import NUM_SECTIONS, RowTensors, SlotState
from gpu_worker.cuda.device import Device, Graph
from gpu_worker.cuda.model import fused_hidden, is_fusible, plain_hidden
from gpu_worker.cuda.operations import Operations
from gpu_worker.cuda.results import MAX_RECORD_LEN, Launched, WantedScores
from gpu_worker.cuda.sampler import Parameters, adjust, draw, needs_of
from gpu_worker.cuda.scores import scored_places, write_records
from gpu_worker.kv_cache import KvCache
from gpu_worker.loading import LoadedModel
from gpu_worker.logprobs import log_probabilities
from gpu_worker.models.decoder import Attention
from gpu_worker.sampler import LEAST_TEMPERATURE, is_adjusted
from gpu_worker.slots import Limits, Row

MAX_IN_FLIGHT = 2
"""Iterations that the device may have before the host waits: one that runs, and the next."""
BUCKETS = (1, 2, 4, *range(8, 257, 8))
"""Rows of the decode batches that graphs are captured for; a batch between two is filled up."""


class CudaRunner:
    """A model on a device, with its KV cache. launch is called by one thread."""

    def __init__(
        self,
        device: Device,
        model: LoadedModel,
        kv_cache: KvCache,
        backend: AttentionBackend[PagedBatch],
        operations: Operations,
        limits: Limits,
    ) -> None:
        """kv_cache has one block more than limits say, which no plan can name."""
        assert kv_cache.num_blocks == limits.num_blocks + 1, "the last block takes what fills up a batch"
        self.kv_cache = kv_cache
        self.max_in_flight = MAX_IN_FLIGHT
        self._device = device
        self._model = model
        self._backend = backend
        self._operations = operations
        self._limits = limits
        self._state = SlotState(device, limits)
        self._section = limits.max_num_slots + 1
        self._packed = torch.zeros(NUM_SECTIONS * self._section, dtype=torch.int32, device=device.torch_device)
        self._rows = RowTensors.of(self._packed)
        self._is_fused = is_fusible(model.family, model.config)
        self._eos_token_ids = model.eos_token_ids
        # One for all graphs: each has gone through it before the next is replayed.
        self._logits = torch.zeros(
            min(BUCKETS[-1], limits.max_num_slots),
            limits.vocab_size,
            dtype=model.weights.head.dtype,
            device=device.torch_device,
        )
        self._graphs: dict[int, Graph] = {}
        # Of each iteration in flight: what the host writes for it, and what it reads of it (see results).
        self._inputs = [device.host_buffer(NUM_SECTIONS * self._section) for _ in range(MAX_IN_FLIGHT)]
        num_words = self._section + limits.max_chunk_tokens * MAX_RECORD_LEN
        self._outputs = [device.host_buffer(num_words) for _ in range(MAX_IN_FLIGHT)]
        self._results = [
            torch.zeros(num_words, dtype=torch.int32, device=device.torch_device) for _ in range(MAX_IN_FLIGHT)
        ]
        self._events = [tuple(device.event() for _ in range(3)) for _ in range(MAX_IN_FLIGHT)]
        self._num_launched = 0

    @property
    def buckets(self) -> tuple[int, ...]:
        """Sizes of the decode batches that have a graph, ascending."""
        return tuple(sorted(self._graphs))

    def run(self, rows: Sequence[Row]) -> list[int]:
        """Launch an iteration and wait for it; return a token for each sampled row, in their order."""
        return self.launch(rows).wait().token_ids if rows else []

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> Launched:
        """Enqueue at least one row. At most max_in_flight launches may not have been waited for."""
        parity = self._num_launched % MAX_IN_FLIGHT
        self._num_launched += 1
        started, finished, copied = self._events[parity]
        started.record()
        ordered, sampled, order = _order(rows)
        wanted = WantedScores.of(ordered)
        num_words = len(sampled) + wanted.num_records * wanted.record_len
        results, output = self._results[parity][:num_words], self._outputs[parity][:num_words]
        tokens = results[: len(sampled)]
        records = results[len(sampled) :].view(wanted.num_records, wanted.record_len)
        self._state.update(rows)
        if wanted.prompt:
            logits = self._score_prompts(ordered, sampled, self._inputs[parity], records[len(wanted.sampled) :])
        else:
            logits = self._compute(ordered, sampled, self._inputs[parity])
        if sampled:
            self._draw([ordered[place] for place in sampled], logits, tokens, records[: len(wanted.sampled)])
        finished.record()
        with self._device.side_stream():
            # Beside the next iteration, which has another of the two buffers.
            output.copy_(results, non_blocking=True)
            copied.record()
        return Launched(order, wanted, output, started, finished, copied)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Compute at least one row and draw nothing; return the logits of sampled ones, (samples, vocab), in the rows'
        order. For checks: waits for the device, and for whatever is in flight."""
        self._device.synchronize()
        ordered, sampled, order = _order(rows)
        self._state.update(rows)
        logits = self._compute(ordered, sampled, self._inputs[0])[order].clone()
        self._device.synchronize()
        return logits

    @torch.inference_mode()
    def warm_up(self, *, has_graphs: bool = True) -> float:
        """Compute decode batches of each size once, and record a graph for each; return the seconds it took.

        Without graphs, kernels are compiled all the same: no stream should wait for that. The largest comes first, so
        that the smaller ones find room in the memory that the graphs share.
        """
        started_ns = time.monotonic_ns()
        most = min(self._limits.max_num_slots, self._limits.max_chunk_tokens)
        sizes = sorted({min(size, most) for size in BUCKETS if size < most} | {min(most, BUCKETS[-1])}, reverse=True)
        self._fill_with_trash()
        for size in sizes:
            self._decode_logits(size)  # Without a graph: what is compiled or allocated once must not be in it.
            self._device.synchronize()
            if has_graphs:
                self._graphs[size] = self._device.capture(partial(self._decode_logits, size), self._buffers)
        self._device.synchronize()
        return (time.monotonic_ns() - started_ns) / 1e9

    def _compute(self, rows: Sequence[Row], sampled: Sequence[int], host: Tensor) -> Tensor:
        """Enqueue the forward pass of rows, decodes first; return the logits of the sampled ones, (samples, vocab)."""
        num_decodes = sum(row.num_tokens == 1 for row in rows)
        bucket = self._bucket_of(len(rows)) if num_decodes == len(rows) else None
        num_rows = bucket or len(rows)
        self._send(rows, sampled, num_rows, host)
        if bucket is not None:
            logits = self._graphs[bucket].replay()
        elif num_decodes == len(rows):
            logits = self._decode_logits(num_rows)
        else:
            return self._head(self._hybrid_hidden(rows, num_decodes, self._last_tokens(len(rows), len(sampled))))
        # Usually all rows are sampled, and none is copied.
        return logits[: len(rows)] if len(sampled) == len(rows) else logits[self._rows.sampled[: len(sampled)].long()]

    def _score_prompts(self, rows: Sequence[Row], sampled: Sequence[int], host: Tensor, records: Tensor) -> Tensor:
        """As _compute, of an iteration that scores prompts; write their records, too.

        One pass through the layers. The head then takes no more rows at a time than there are slots: as many as memory
        has been measured for, where logits of a whole chunk would take 0.5 GB.
        """
        self._send(rows, sampled, len(rows), host)
        places, slots, positions = self._device.upload(scored_places(rows))
        lasts = self._last_tokens(len(rows), len(sampled))
        num_decodes = sum(row.num_tokens == 1 for row in rows)
        hidden = self._hybrid_hidden(rows, num_decodes, torch.cat([lasts, places]))
        token_ids = self._state.tokens[slots, positions]
        size = self._limits.max_num_slots
        pieces = (torch.split(tensor, size) for tensor in (hidden[len(sampled) :], token_ids, records))
        for piece, ids, written in zip(*pieces, strict=True):
            write_records(written, self._log_probabilities(self._head(piece)), ids)
        return self._head(hidden[: len(sampled)])

    def _send(self, rows: Sequence[Row], sampled: Sequence[int], num_rows: int, host: Tensor) -> None:
        """Upload the rows, and as many more as fill the batch up to num_rows: decodes of nothing."""
        num_filled = num_rows - len(rows)
        sections = host.numpy().reshape(NUM_SECTIONS, -1)
        sections[0, :num_rows] = [row.resident.slot for row in rows] + [self._state.trash_slot] * num_filled
        sections[1, 0] = 0
        np.cumsum([row.num_tokens for row in rows] + [1] * num_filled, out=sections[1, 1 : num_rows + 1])
        sections[2, :num_rows] = [row.start + row.num_tokens for row in rows] + [1] * num_filled
        sections[3, : len(sampled)] = sampled
        self._packed.copy_(host, non_blocking=True)

    def _decode_logits(self, num_rows: int) -> Tensor:
        """Enqueue a batch of num_rows decodes out of the row buffers; return the logits of all, (num_rows, vocab)."""
        slots, kv_lens = self._rows.slots[:num_rows], self._rows.kv_lens[:num_rows]
        tables = self._state.tables.index_select(0, slots)  # (rows, table_width)
        positions = (kv_lens - 1).long()
        batch = PagedBatch(
            query_starts=self._rows.query_starts[: num_rows + 1],
            kv_lens=kv_lens,
            block_tables=tables,
            num_decodes=num_rows,
            max_query_len=0,
            max_kv_len=self._limits.max_model_len,
        )
        # A batch larger than any graph's gets logits of its own.
        logits = self._logits[:num_rows] if num_rows <= len(self._logits) else None
        return self._head(self._hidden(batch, slots, tables, None, positions, None), logits)

    def _last_tokens(self, num_rows: int, num_sampled: int) -> Tensor:
        """Return the place in the flat batch of each sampled row's last token, (samples,) int64."""
        ends = self._rows.query_starts[1 : num_rows + 1]
        return (ends[self._rows.sampled[:num_sampled]] - 1).long()

    def _hybrid_hidden(self, rows: Sequence[Row], num_decodes: int, places: Tensor) -> Tensor:
        """Enqueue a batch with chunks in it; return what the head takes at these places of it, (places, hidden)."""
        num_rows, num_tokens = len(rows), sum(row.num_tokens for row in rows)
        longest = max(row.start + row.num_tokens for row in rows)
        slots, kv_lens = self._rows.slots[:num_rows], self._rows.kv_lens[:num_rows]
        starts = self._rows.query_starts[: num_rows + 1]
        width = -(-longest // self._limits.block_size)
        tables = self._state.tables[:, :width].index_select(0, slots)  # (rows, width)
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=self._device.torch_device)
        row_of_token = torch.searchsorted(starts, tokens, right=True) - 1  # (tokens,) int64
        # A row's tokens end where its keys do.
        positions = (kv_lens[row_of_token] - starts[row_of_token + 1] + tokens).long()
        batch = PagedBatch(
            query_starts=starts,
            kv_lens=kv_lens,
            block_tables=tables,
            num_decodes=num_decodes,
            max_query_len=max((row.num_tokens for row in rows[num_decodes:]), default=0),
            max_kv_len=longest,
        )
        return self._hidden(batch, slots, tables, row_of_token, positions, places)

    def _hidden(
        self,
        batch: PagedBatch,
        slots: Tensor,
        tables: Tensor,
        row_of_token: Tensor | None,
        positions: Tensor,
        sampled: Tensor | None,
    ) -> Tensor:
        """Look up each token and where its KV goes, and run the layers. row_of_token None: token i is row i's only."""
        block_size = self._limits.block_size
        if row_of_token is None:
            row_of_token = torch.arange(len(slots), device=self._device.torch_device)
        token_ids = self._state.tokens[slots[row_of_token], positions]
        blocks = tables[row_of_token, positions // block_size].long()

        model, slots = self._model, blocks * block_size + positions % block_size
        attend = {window: self._attention(batch, window) for window in model.config.windows or (None,)}
        if self._is_fused:
            return fused_hidden(
                model.config,
                model.weights,
                self.kv_cache,
                self._operations,
                attend,
                token_ids=token_ids,
                positions=positions,
                slots=slots,
                sampled=sampled,
            )
        return plain_hidden(
            model.family,
            model.config,
            model.weights,
            self.kv_cache,
            attend,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            sampled=sampled,
        )

    def _head(self, hidden: Tensor, logits: Tensor | None = None) -> Tensor:
        """Return the logits of these rows, (rows, vocab), in the tensor that is given, if one is."""
        return self._operations.linear(hidden, self._model.weights.head, logits)

    def _attention(self, batch: PagedBatch, window: int | None) -> Attention:
        """Return what layers with such a window call."""
        prepared = replace(batch, window=window, scale=self._model.config.attention_scale)
        return partial(_attend, self._backend, prepared)

    def _draw(self, rows: Sequence[Row], logits: Tensor, tokens: Tensor, records: Tensor) -> None:
        """Enqueue the drawing of a token for each of these rows, all sampled; into tokens, and after its request's.

        records are of those tokens whose requests want log-probabilities.
        """
        scored = [place for place, row in enumerate(rows) if row.resident.sampling.logprobs is not None]
        # Now: penalties, biases and bars may be written to the logits, and scores are the model's own.
        logprobs = self._log_probabilities(self._taken(logits, scored)) if scored else None
        logits = self._adjusted(rows, logits)
        self._bar_ends(rows, logits)
        places = self._rows.sampled[: len(rows)].long()
        slots = self._rows.slots[places].long()  # (samples,)
        positions = self._rows.kv_lens[places].long()  # of the tokens drawn now
        samplings = [row.resident.sampling for row in rows]
        is_greedy = [sampling.temperature < LEAST_TEMPERATURE or sampling.top_k == 1 for sampling in samplings]
        state = self._state
        parameters = Parameters(
            is_greedy=(state.temperatures[slots] < LEAST_TEMPERATURE) | (state.top_ks[slots] == 1),
            seeds=state.seeds[slots],
            positions=positions,
            temperatures=state.temperatures[slots].clamp(min=LEAST_TEMPERATURE),
            top_ks=state.top_ks[slots],
            top_ps=state.top_ps[slots],
            min_ps=state.min_ps[slots],
        )
        raced = [sampling for sampling, greedy in zip(samplings, is_greedy, strict=True) if not greedy]
        tokens.copy_(draw(logits, parameters, needs_of(raced), row_by_row=self._operations.is_batch_invariant))
        state.tokens[slots, positions] = tokens
        if logprobs is not None:
            write_records(records, logprobs, self._taken(tokens, scored))

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log-probabilities, (rows, vocab) float32; row by row where another order of sums must not show."""
        if not self._operations.is_batch_invariant:
            return log_probabilities(logits)
        # A copy, since how a row lies in memory decides the order, too.
        return torch.cat([log_probabilities(row.clone()) for row in torch.split(logits, 1)])

    def _taken(self, tensor: Tensor, places: Sequence[int]) -> Tensor:
        """Return these of its rows; itself where that is all."""
        if len(places) == len(tensor):
            return tensor
        return tensor.index_select(0, self._device.upload(torch.tensor(places)))

    def _adjusted(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """Return the logits of these rows with penalties and biases of those that ask for any."""
        asked = [(place, row) for place, row in enumerate(rows) if is_adjusted(row.resident.sampling)]
        if not asked:
            return logits
        logits = logits.float()
        for place, row in asked:
            resident, end = row.resident, row.start + row.num_tokens
            adjust(
                logits[place],
                resident.sampling,
                self._state.tokens[resident.slot, :end],
                resident.num_prompt_tokens,
                self._device.upload,
            )
        return logits

    def _bar_ends(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Bar ends from outputs that are still too short to end, in place."""
        vocab_size = self._limits.vocab_size
        barred: list[tuple[int, int]] = []
        for place, row in enumerate(rows):
            sampling = row.resident.sampling
            if row.start + row.num_tokens - row.resident.num_prompt_tokens < sampling.min_tokens:
                ends = (*self._eos_token_ids, *sampling.stop_token_ids)
                barred += [(place, token_id) for token_id in ends if 0 <= token_id < vocab_size]
        if barred:
            places = self._device.upload(torch.tensor(barred, dtype=torch.int64).T.contiguous())
            logits[places[0], places[1]] = float("-inf")

    def _bucket_of(self, num_rows: int) -> int | None:
        """Return the smallest batch with a graph that holds so many rows."""
        return next((size for size in self.buckets if size >= num_rows), None)

    def _fill_with_trash(self) -> None:
        """Make every row a decode of nothing, for captures."""
        self._send((), (), self._limits.max_num_slots, self._inputs[0])

    def _buffers(self) -> tuple[Tensor, ...]:
        return (self._packed, self._logits, *self._state.buffers(), *self.kv_cache.keys, *self.kv_cache.values)


def _attend(
    backend: AttentionBackend[PagedBatch], prepared: PagedBatch, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    return backend.attend(queries, keys, values, prepared)


def _order(rows: Sequence[Row]) -> tuple[list[Row], list[int], list[int]]:
    """Return the rows with decodes first; which of those are sampled; and for each sampled row as rows have them, its
    place among the sampled ones."""
    places = sorted(range(len(rows)), key=lambda place: rows[place].num_tokens > 1)  # stable
    ordered = [rows[place] for place in places]
    sampled = [place for place, row in enumerate(ordered) if row.is_sampled]
    rank = {places[place]: index for index, place in enumerate(sampled)}
    return ordered, sampled, [rank[place] for place in range(len(rows)) if place in rank]
