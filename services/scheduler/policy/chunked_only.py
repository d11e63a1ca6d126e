"""Chunks without hybrid batches (an ablation of the Sarathi-Serve paper): an iteration holds prefill chunks or decodes,
never both; they take turns."""

from collections.abc import Iterable
from itertools import chain

from services.scheduler.policy.batch import Batch, Candidate, Policy, Running


def fill(batch: Batch, running: Running, waiting: Iterable[Candidate]) -> None:
    if running.decoding and batch.room.follows_prefill:
        batch.take_decodes(running.decoding)
        return
    for candidate in chain(running.prefilling, waiting):
        num_tokens = batch.largest_chunk(candidate)
        if num_tokens == 0:
            break
        batch.take_chunk(candidate, num_tokens)
    if not batch.chunks:
        batch.take_decodes(running.decoding)


POLICY = Policy(name="chunked_only", fill=fill)
