"""Hybrid batches without chunks (an ablation of the Sarathi-Serve paper): whole prompts beside decodes, up to a bound
on their tokens."""

from collections.abc import Iterable
from itertools import chain

from services.scheduler.policy.batch import Batch, Candidate, Policy, Running


def fill(batch: Batch, running: Running, waiting: Iterable[Candidate]) -> None:
    batch.take_decodes(running.decoding)
    for candidate in chain(running.prefilling, waiting):
        num_tokens = batch.whole_chunk(candidate, batch.num_batched_left)
        if num_tokens == 0:
            break
        batch.take_chunk(candidate, num_tokens)


POLICY = Policy(name="hybrid_only", fill=fill, is_chunked=False)
