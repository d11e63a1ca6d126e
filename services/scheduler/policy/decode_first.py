"""Decode first (FasterTransformer): a batch runs until its last request has ended; only then does the next begin."""

from collections.abc import Iterable
from itertools import chain

from services.scheduler.policy.batch import Batch, Candidate, Policy, Running


def fill(batch: Batch, running: Running, waiting: Iterable[Candidate]) -> None:
    if running.decoding and not running.prefilling:
        batch.take_decodes(running.decoding)
        return
    newcomers: Iterable[Candidate] = () if running.decoding else waiting
    for candidate in chain(running.prefilling, newcomers):
        num_tokens = batch.whole_chunk(candidate, batch.num_batched_left)
        if num_tokens == 0:
            break
        batch.take_chunk(candidate, num_tokens)


POLICY = Policy(name="decode_first", fill=fill, is_chunked=False)
