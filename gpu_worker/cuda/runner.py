"""Iterations on a device, launched one ahead: the host prepares the next while the device computes this one.

The host waits once an iteration, for an event, when its tokens are wanted. Until then it has only enqueued work:
nothing that it needs to know depends on a value that the device computed.

A model over several devices has a runner on each. All are given the same rows in the same order; what they tell each
other, sums and hidden states and drawn tokens, goes from device to device (see gpu_worker.parallel.group).
"""

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.paged import PagedBatch
from gpu_worker.cuda.buffers import NUM_SECTIONS, RowTensors, SlotState
from gpu_worker.cuda.device import Device, Graph
from gpu_worker.cuda.drawing import Drawing
from gpu_worker.cuda.forward import DeviceForward
from gpu_worker.cuda.operations import Operations
from gpu_worker.cuda.results import MAX_RECORD_LEN, Launched, WantedScores
from gpu_worker.cuda.returns import Returns
from gpu_worker.cuda.scores import scored_places, write_records
from gpu_worker.kv_cache import KvCache
from gpu_worker.loading import LoadedModel
from gpu_worker.parallel.group import Group
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
        group: Group | None = None,
    ) -> None:
        """kv_cache has one block more than limits say, which no plan can name; limits are the whole model's. group ties
        this rank to others, which all have a runner of their shard; by default there are none."""
        assert kv_cache.num_blocks == limits.num_blocks + 1, "the last block takes what fills up a batch"
        self.kv_cache = kv_cache
        self.max_in_flight = MAX_IN_FLIGHT
        self.device = device
        self._group = group or Group.alone(device.torch_device)
        self._layout = self._group.layout
        self._forward = DeviceForward(model, kv_cache, backend, operations, self._group, limits.vocab_size)
        self._limits = limits
        self._state = SlotState(device, limits)
        self._section = limits.max_num_slots + 1
        self._packed = torch.zeros(NUM_SECTIONS * self._section, dtype=torch.int32, device=device.torch_device)
        self._rows = RowTensors.of(self._packed)
        self._drawing = Drawing(
            device,
            self._state,
            self._rows,
            limits,
            model.eos_token_ids,
            row_by_row=operations.is_batch_invariant,
        )
        # One for all graphs: each has gone through it before the next is replayed.
        self._logits = torch.zeros(
            min(BUCKETS[-1], limits.max_num_slots) if self._layout.samples else 0,
            limits.vocab_size,
            dtype=model.weights.head.dtype,
            device=device.torch_device,
        )
        # What the stage before hands over of a batch of decodes; of a batch with chunks it has a place of its own.
        self._received = torch.zeros(
            0 if self._layout.is_first_stage else limits.max_num_slots,
            model.config.hidden_size,
            dtype=model.weights.head.dtype,
            device=device.torch_device,
        )
        self._returns = Returns(self._state, self._group, device)
        self._graphs: dict[int, Graph] = {}
        # Of each iteration in flight: what the host writes for it, and what it reads of it (see results).
        self._inputs = [device.host_buffer(NUM_SECTIONS * self._section) for _ in range(MAX_IN_FLIGHT)]
        num_words = self._section + limits.max_chunk_tokens * MAX_RECORD_LEN
        self._outputs = [device.host_buffer(num_words) for _ in range(MAX_IN_FLIGHT)]
        self._results = [
            torch.zeros(num_words, dtype=torch.int32, device=device.torch_device) for _ in range(MAX_IN_FLIGHT)
        ]
        self._events = [tuple(device.event() for _ in range(4)) for _ in range(MAX_IN_FLIGHT)]
        self._num_launched = 0

    @property
    def buckets(self) -> tuple[int, ...]:
        """Sizes of the decode batches that have a graph, ascending."""
        return tuple(sorted(self._graphs))

    def run(self, rows: Sequence[Row]) -> list[int]:
        """Launch an iteration and wait for it; return a token for each sampled row, in their order, where this rank
        samples. The first of several stages has the last one's tokens when what it launches next begins."""
        token_ids = self.launch(rows).wait().token_ids if rows else []
        self._returns.take_all()
        return token_ids

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> Launched:
        """Enqueue at least one row. At most max_in_flight launches may not have been waited for."""
        parity = self._num_launched % MAX_IN_FLIGHT
        self._num_launched += 1
        started, ready, finished, copied = self._events[parity]
        started.record()
        self._returns.take_for(rows)
        received = self._receive(rows)
        if self._layout.pp > 1:
            ready.record()
        else:
            ready = started
        ordered, sampled, order = _order(rows)
        wanted = WantedScores.of(ordered if self._layout.samples else ())
        num_words = len(sampled) + wanted.num_records * wanted.record_len
        results = self._results[parity][:num_words]
        output = self._outputs[parity][: num_words if self._layout.samples else 0]
        tokens = results[: len(sampled)]
        records = results[len(sampled) :].view(wanted.num_records, wanted.record_len)
        drawn = [ordered[place] for place in sampled]
        self._state.update(rows)
        given = self._compute(ordered, sampled, self._inputs[parity], received, records[len(wanted.sampled) :])
        if self._layout.is_last_stage and sampled:
            if self._layout.samples:
                self._drawing.draw(drawn, given, tokens, records[: len(wanted.sampled)])
            self._drawing.keep(self._group.broadcast(tokens))
        finished.record()
        with self.device.side_stream():
            # Beside the next iteration, which has another of the two buffers.
            output.copy_(results[: len(output)], non_blocking=True)
            copied.record()
        # Last: the stream waits here while too much of what was sent before has not arrived.
        self._hand_over(given, tokens, drawn)
        return Launched(order if self._layout.samples else (), wanted, output, started, ready, finished, copied)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Compute at least one row and draw nothing; return the logits of sampled ones, (samples, vocab), in the rows'
        order; none on ranks that do not sample. For checks: waits for the device, and for whatever is in flight."""
        self.device.synchronize()
        ordered, sampled, order = _order(rows)
        self._state.update(rows)
        given = self._compute(ordered, sampled, self._inputs[0], self._receive(rows), None)
        self._hand_over(given, self._results[0][:0], ())
        logits = given[order].clone() if self._layout.samples else given[:0]
        self.device.synchronize()
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
            self._decode(size)  # Without a graph: what is compiled or allocated once must not be in it.
            self.device.synchronize()
            if has_graphs:
                self._graphs[size] = self.device.capture(partial(self._decode, size), self._buffers)
        self.device.synchronize()
        return (time.monotonic_ns() - started_ns) / 1e9

    def _receive(self, rows: Sequence[Row]) -> Tensor | None:
        """Ask for what the stage before hands over of these rows, (tokens, hidden); None on the first stage."""
        if self._layout.is_first_stage:
            return None
        num_tokens = sum(row.num_tokens for row in rows)
        received = self._received[:num_tokens]
        if num_tokens > len(rows):
            received = self._received.new_empty(num_tokens, self._received.shape[1])
        self._group.receive(received)
        return received

    def _hand_over(self, given: Tensor, tokens: Tensor, drawn: Sequence[Row]) -> None:
        """Give the next stage what this one has made of its rows; have tokens, each drawn for one of the drawn rows, go
        from the last stage to the first."""
        if not self._layout.is_last_stage:
            self._group.send(given)
        if drawn and self._layout.pp > 1:
            if self._layout.is_last_stage:
                self._group.send_back(tokens.clone())  # Its buffer may be another iteration's before it has arrived.
            if self._layout.is_first_stage:
                self._returns.expect(drawn)

    def _compute(
        self, rows: Sequence[Row], sampled: Sequence[int], host: Tensor, received: Tensor | None, records: Tensor | None
    ) -> Tensor:
        """Enqueue this stage's part of rows, decodes first.

        Args:
            rows: At least one.
            sampled: Places of those that are sampled.
            host: What is uploaded is written there.
            received: What the stage before has made of them; None on the first.
            records: Of prompt tokens that are scored, written where this rank samples; None scores none.

        Returns:
            The logits of sampled rows, (samples, vocab), on the rank that samples. Before the last stage what the next
            one takes, (tokens, hidden), which nothing writes to any more.
        """
        num_decodes = sum(row.num_tokens == 1 for row in rows)
        is_last = self._layout.is_last_stage
        if records is not None and is_last and any(row.scored for row in rows):
            return self._score_prompts(rows, sampled, host, received, records)
        bucket = self._bucket_of(len(rows)) if num_decodes == len(rows) else None
        num_rows = bucket or len(rows)
        self._send(rows, sampled, num_rows, host)
        if num_decodes < len(rows):
            lasts = self._last_tokens(len(rows), len(sampled))
            hidden = self._hybrid_hidden(rows, num_decodes, received, lasts)
            return self._forward.logits(hidden) if is_last else hidden
        given = self._decode(num_rows) if bucket is None else self._graphs[bucket].replay()
        if not is_last:
            return given[: len(rows)].clone()  # The next replay writes there.
        if not self._layout.samples:
            return given
        # Usually all rows are sampled, and none is copied.
        return given[: len(rows)] if len(sampled) == len(rows) else given[self._rows.sampled[: len(sampled)].long()]

    def _score_prompts(
        self, rows: Sequence[Row], sampled: Sequence[int], host: Tensor, received: Tensor | None, records: Tensor
    ) -> Tensor:
        """As _compute, of an iteration that scores prompts, on the last stage.

        One pass through the layers. The head then takes no more rows at a time than there are slots: as many as memory
        has been measured for, where logits of a whole chunk would take 0.5 GB.
        """
        self._send(rows, sampled, len(rows), host)
        places, slots, positions = self.device.upload(scored_places(rows))
        lasts = self._last_tokens(len(rows), len(sampled))
        num_decodes = sum(row.num_tokens == 1 for row in rows)
        hidden = self._hybrid_hidden(rows, num_decodes, received, torch.cat([lasts, places]))
        token_ids = self._state.tokens[slots, positions]
        size = self._limits.max_num_slots
        pieces = zip(torch.split(hidden[len(sampled) :], size), torch.split(token_ids, size), strict=True)
        for index, (piece, ids) in enumerate(pieces):
            logits = self._forward.logits(piece)
            if self._layout.samples:
                write_records(records[index * size :][: len(ids)], self._drawing.log_probabilities(logits), ids)
        return self._forward.logits(hidden[: len(sampled)])

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

    def _decode(self, num_rows: int) -> Tensor:
        """Enqueue this stage's part of num_rows decodes out of the row buffers; return the logits of all, (num_rows,
        vocab), or what the next stage takes, (num_rows, hidden)."""
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
        # Layers add to it, over and over to the rows that fill up a batch: a copy.
        received = None if self._layout.is_first_stage else self._received[:num_rows].clone()
        hidden = self._hidden(batch, slots, tables, None, positions, received, None)
        if not self._layout.is_last_stage:
            return hidden
        # A batch larger than any graph's gets logits of its own.
        return self._forward.logits(hidden, self._logits[:num_rows] if num_rows <= len(self._logits) else None)

    def _last_tokens(self, num_rows: int, num_sampled: int) -> Tensor:
        """Return the place in the flat batch of each sampled row's last token, (samples,) int64."""
        ends = self._rows.query_starts[1 : num_rows + 1]
        return (ends[self._rows.sampled[:num_sampled]] - 1).long()

    def _hybrid_hidden(self, rows: Sequence[Row], num_decodes: int, received: Tensor | None, places: Tensor) -> Tensor:
        """Enqueue a batch with chunks in it; return what the head takes at these places of it, (places, hidden), or
        before the last stage what the next one takes of all."""
        num_rows, num_tokens = len(rows), sum(row.num_tokens for row in rows)
        longest = max(row.start + row.num_tokens for row in rows)
        slots, kv_lens = self._rows.slots[:num_rows], self._rows.kv_lens[:num_rows]
        starts = self._rows.query_starts[: num_rows + 1]
        width = -(-longest // self._limits.block_size)
        tables = self._state.tables[:, :width].index_select(0, slots)  # (rows, width)
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=self.device.torch_device)
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
        return self._hidden(batch, slots, tables, row_of_token, positions, received, places)

    def _hidden(
        self,
        batch: PagedBatch,
        slots: Tensor,
        tables: Tensor,
        row_of_token: Tensor | None,
        positions: Tensor,
        received: Tensor | None,
        sampled: Tensor | None,
    ) -> Tensor:
        """Look up each token, where none was received, and where its KV goes, and run the layers. row_of_token None:
        token i is row i's only."""
        block_size = self._limits.block_size
        if row_of_token is None:
            row_of_token = torch.arange(len(slots), device=self.device.torch_device)
        if received is None:
            received = self._forward.embed(self._state.tokens[slots[row_of_token], positions])
        blocks = tables[row_of_token, positions // block_size].long()
        return self._forward.layers(
            batch,
            received,
            positions=positions,
            slots=blocks * block_size + positions % block_size,
            sampled=sampled,
        )

    def _bucket_of(self, num_rows: int) -> int | None:
        """Return the smallest batch with a graph that holds so many rows."""
        return next((size for size in self.buckets if size >= num_rows), None)

    def _fill_with_trash(self) -> None:
        """Make every row a decode of nothing, for captures."""
        self._send((), (), self._limits.max_num_slots, self._inputs[0])

    def _buffers(self) -> tuple[Tensor, ...]:
        own = (self._packed, self._logits, self._received)
        return (*own, *self._state.buffers(), *self.kv_cache.keys, *self.kv_cache.values)


def _order(rows: Sequence[Row]) -> tuple[list[Row], list[int], list[int]]:
    """Return the rows with decodes first; which of those are sampled; and for each sampled row as rows have them, its
    place among the sampled ones."""
    places = sorted(range(len(rows)), key=lambda place: rows[place].num_tokens > 1)  # stable
    ordered = [rows[place] for place in places]
    sampled = [place for place, row in enumerate(ordered) if row.is_sampled]
    rank = {places[place]: index for index, place in enumerate(sampled)}
    return ordered, sampled, [rank[place] for place in range(len(rows)) if place in rank]
