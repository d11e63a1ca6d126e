"""Prefill first (vLLM of 2023): whole prompts as soon as they can begin, alone in their iterations; running streams
wait meanwhile."""

from collections.abc import Iterable
from itertools import chain

from services.scheduler.policy.batch import Batch, Candidate, Policy, Running


def fill(batch: Batch, running: Running, waiting: Iterable[Candidate]) -> None:
    for candidate in chain(running.prefilling, waiting):
        num_tokens = batch.whole_chunk(candidate, batch.num_batched_left)
        if num_tokens == 0:
            break
        batch.take_chunk(candidate, num_tokens)
    if not batch.chunks:
        batch.take_decodes(running.decoding)


POLICY = Policy(name="prefill_first", fill=fill, is_chunked=False)
