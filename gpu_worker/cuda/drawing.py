"""Tokens drawn on the device: what requests ask of their logits, and what becomes of the tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.cuda.buffers import RowTensors, SlotState
from gpu_worker.cuda.device import Device
from gpu_worker.cuda.sampler import Parameters, adjust, draw, needs_of
from gpu_worker.cuda.scores import write_records
from gpu_worker.logprobs import log_probabilities
from gpu_worker.sampler import LEAST_TEMPERATURE, is_adjusted
from gpu_worker.slots import Limits, Row


class Drawing:
    """Enqueues, and never waits. Of the iteration whose rows are in the row buffers."""

    def __init__(
        self,
        device: Device,
        state: SlotState,
        rows: RowTensors,
        limits: Limits,
        eos_token_ids: tuple[int, ...],
        *,
        row_by_row: bool,
    ) -> None:
        """row_by_row: take sums over the vocabulary of one row at a time, see sampler.draw."""
        self._device = device
        self._state = state
        self._rows = rows
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._row_by_row = row_by_row

    def draw(self, rows: Sequence[Row], logits: Tensor, tokens: Tensor, records: Tensor) -> None:
        """Enqueue the drawing of a token for each of these rows, all sampled; into tokens.

        records are of those tokens whose requests want log-probabilities.
        """
        scored = [place for place, row in enumerate(rows) if row.resident.sampling.logprobs is not None]
        # Now: penalties, biases and bars may be written to the logits, and scores are the model's own.
        logprobs = self.log_probabilities(self._taken(logits, scored)) if scored else None
        logits = self._adjusted(rows, logits)
        self._bar_ends(rows, logits)
        slots, positions = self._drawn_places(len(rows))
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
        tokens.copy_(draw(logits, parameters, needs_of(raced), row_by_row=self._row_by_row))
        if logprobs is not None:
            write_records(records, logprobs, self._taken(tokens, scored))

    def keep(self, tokens: Tensor) -> None:
        """Put each token that was drawn now after its request's."""
        self._state.tokens[self._drawn_places(len(tokens))] = tokens

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Return log-probabilities, (rows, vocab) float32; row by row where another order of sums must not show."""
        if not self._row_by_row:
            return log_probabilities(logits)
        # A copy, since how a row lies in memory decides the order, too.
        return torch.cat([log_probabilities(row.clone()) for row in torch.split(logits, 1)])

    def _drawn_places(self, num_sampled: int) -> tuple[Tensor, Tensor]:
        """Return the slots of the rows that are sampled now, and the positions of their tokens, each (samples,)."""
        places = self._rows.sampled[:num_sampled].long()
        return self._rows.slots[places].long(), self._rows.kv_lens[places].long()

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
            # A number in its place would be made a tensor on the host, and the host wait until it is copied.
            logits[places[0], places[1]] = logits.new_full((len(barred),), float("-inf"))
