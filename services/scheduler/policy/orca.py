"""Orca (Yu et al., OSDI 2022): iteration-level batching of whole prompts beside decodes, first come first served; the
KV cache of prompt and longest output is set aside when a request begins."""

from collections.abc import Iterable
from itertools import chain

from services.scheduler.policy.batch import Batch, Candidate, Policy, Running


def fill(batch: Batch, running: Running, waiting: Iterable[Candidate]) -> None:
    batch.take_decodes(running.decoding)
    for candidate in chain(running.prefilling, waiting):
        num_tokens = batch.whole_chunk(candidate, batch.room.max_tokens - batch.load.num_tokens)
        if num_tokens == 0:
            break
        batch.take_chunk(candidate, num_tokens)


POLICY = Policy(name="orca", fill=fill, is_chunked=False, reserves_max_len=True)
