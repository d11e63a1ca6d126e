"""One iteration: rows become flat batches, the model runs on them, tokens are drawn and join their requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.ids import Slot
from common.messages.plans import SlotScores
from gpu_worker.batch import flatten, passes
from gpu_worker.forward import Forward
from gpu_worker.kv_cache import KvCache
from gpu_worker.logprobs import ScoreBook, log_probabilities
from gpu_worker.sampler import Draw, sample
from gpu_worker.slots import Row


@dataclass(slots=True)
class Outcome:
    """What an iteration brings."""

    slots: list[Slot] = field(default_factory=list)  # of sampled rows, in their order
    token_ids: list[int] = field(default_factory=list)  # parallel
    sampled_scores: list[SlotScores] = field(default_factory=list)
    prompt_scores: list[SlotScores] = field(default_factory=list)


class Runner:
    """A model with its KV cache. Used by one thread."""

    def __init__(self, forward: Forward, kv_cache: KvCache, eos_token_ids: tuple[int, ...], max_logits: int) -> None:
        """max_logits is how many tokens of one call of forward may have logits."""
        self.kv_cache = kv_cache
        self._forward = forward
        self._eos_token_ids = eos_token_ids
        self._max_logits = max_logits

    def run(self, rows: Sequence[Row]) -> Outcome:
        """Compute the rows, and draw a token for each sampled one; each joins its request."""
        outcome = Outcome()
        if not rows:
            return outcome
        books: dict[Slot, tuple[int, ScoreBook]] = {}
        with torch.inference_mode():
            for together in passes(rows, self._max_logits):
                logits = self.logits(together)
                self._score_prompts(together, logits, books)
                self.draw(together, logits, outcome)
        outcome.prompt_scores = [SlotScores(slot, first, book.scores()) for slot, (first, book) in books.items()]
        return outcome

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Compute at least one row, and return logits, (samples, vocab), until the next call: of each row those that
        score its prompt, then those it is sampled from."""
        return self._forward(flatten(rows, self.kv_cache.block_size))

    def draw(self, rows: Sequence[Row], logits: Tensor, outcome: Outcome) -> None:
        """Draw a token for each sampled row from its logits, which may be written to."""
        sampled = [row for row in rows if row.is_sampled]
        if not sampled:
            return
        if len(logits) > len(sampled):
            ends = torch.tensor([row.num_logits for row in rows]).cumsum(0) - 1
            logits = logits[ends[torch.tensor([row.is_sampled for row in rows])]]
        asked = [index for index, row in enumerate(sampled) if row.resident.sampling.logprobs is not None]
        logprobs = log_probabilities(logits[asked]) if asked else None
        # The iteration's one wait for the device.
        tokens: list[int] = sample(logits, [_draw_of(row) for row in sampled], self._eos_token_ids).tolist()
        for row, token in zip(sampled, tokens, strict=True):
            row.resident.token_ids.append(token)
        outcome.slots += [row.resident.slot for row in sampled]
        outcome.token_ids += tokens
        for place, index in enumerate(asked):
            assert logprobs is not None
            row = sampled[index]
            book = ScoreBook(row.resident.sampling.logprobs or 0)
            book.add(logprobs[place : place + 1], tokens[index : index + 1])
            outcome.sampled_scores.append(SlotScores(row.resident.slot, row.start + row.num_tokens, book.scores()))

    def _score_prompts(self, rows: Sequence[Row], logits: Tensor, books: dict[Slot, tuple[int, ScoreBook]]) -> None:
        """Score the prompt tokens that logits of these rows are there for; a book for each request, and where it
        begins."""
        start = 0
        for row in rows:
            scored, resident = row.scored, row.resident
            if scored:
                num_top = resident.sampling.prompt_logprobs or 0
                _, book = books.setdefault(resident.slot, (scored.start, ScoreBook(num_top)))
                logprobs = log_probabilities(logits[start : start + len(scored)])
                book.add(logprobs, resident.token_ids[scored.start : scored.stop])
            start += row.num_logits


def _draw_of(row: Row) -> Draw:
    resident = row.resident
    position = row.start + row.num_tokens
    return Draw(resident.sampling, resident.seed, position, resident.num_prompt_tokens, resident.token_ids)
