"""Stall-free batching (Sarathi-Serve, Agrawal et al., OSDI 2024, algorithm 3): decodes first, then prefill chunks in
the time that they leave.

One refinement: of that time the oldest prompt gets a share of its own, and the shortest prompts the rest. A short
prompt does not wait for a long one to end, and a long one is slowed down by no more than the share.
"""

from collections.abc import Iterable
from itertools import islice

from services.scheduler.events import Bound
from services.scheduler.policy.batch import Batch, Candidate, Policy, Running

OLDEST_SHARE = 0.5
"""Of an iteration's prefill, what the oldest prompt gets while others wait beside it. Behind a long prompt, n prompts
of s tokens each are read within 2 n s / (prefill tokens of an iteration) iterations, and the long one takes at most
twice as long as alone."""
MAX_PREFILLS = 16
"""Prompts that share an iteration."""


def fill(batch: Batch, running: Running, waiting: Iterable[Candidate]) -> None:
    # Decodes lead because each one is a client watching a stream: skipping it shows as TBT, whereas a later prefill
    # chunk only moves a TTFT.
    batch.take_decodes(running.decoding)
    queue = running.prefilling[:MAX_PREFILLS]
    queue += islice(waiting, MAX_PREFILLS - len(queue))
    if not queue:
        return
    oldest, *others = queue
    num_tokens = batch.largest_chunk(oldest)
    if num_tokens == 0:
        return
    if others and num_tokens < oldest.num_tokens and batch.bound is not Bound.FLOOR:  # Too little to be shared.
        num_tokens = max(1, int(num_tokens * OLDEST_SHARE))
    index = len(batch.chunks)
    batch.take_chunk(oldest, num_tokens)
    for candidate in sorted(others, key=_urgency):
        num_tokens = batch.largest_chunk(candidate)
        if num_tokens == 0:
            return
        batch.take_chunk(candidate, num_tokens)
    if others:
        batch.grow_chunk(index)


def _urgency(candidate: Candidate) -> tuple[int, int]:
    return candidate.request.arrived.priority, candidate.num_tokens


POLICY = Policy(name="stall_free", fill=fill, num_shared=MAX_PREFILLS)
