"""Warm-up and measurement at start-up: how long iterations of various sizes take on this machine.

Iterations are hybrid, as they will be in service: some decodes at a moderate context, and one chunk that fills up to
the size. The scheduler derives its first token budgets from these points.
"""

import random
import time
from array import array
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Protocol

from common.ids import RequestId, Slot
from common.messages.cards import ProfilePoint
from common.messages.requests import Sampling
from gpu_worker.slots import Limits, Resident, Row

MAX_DECODES = 8
"""Decodes beside the chunk."""
DECODE_CONTEXT = 256
"""Tokens that each of them looks back on, where the pool allows."""
MAX_RUNS = 5
"""Measurements per point, of which the median counts."""
MAX_POINT_SHARE = 0.1
"""Of the whole time, what one point may take after its first run."""


class Runs(Protocol):
    """What is measured: a runner, or several that work together."""

    def run(self, rows: Sequence[Row]) -> object:
        """Compute the rows; return when that is done."""


def profile(
    runner: Runs, limits: Limits, profile_seconds: float, should_stop: Callable[[], bool] = lambda: False
) -> tuple[ProfilePoint, ...]:
    """Measure iterations of growing size until profile_seconds are spent; the first points are always there.

    Writes to the KV pool, so call it before any plan. Leaves finite numbers there, which no request will read.
    """
    points: list[ProfilePoint] = []
    deadline_ns = time.monotonic_ns() + int(profile_seconds * 1e9)
    share_ns = int(profile_seconds * 1e9 * MAX_POINT_SHARE)
    _measure(runner, limits, 1)  # The first iteration of all loads kernels and allocates buffers.
    for num_tokens in _sizes(limits):
        # Twice the tokens take at most about twice the time. A late start is worse than a missing point.
        expected_ns = 2 * points[-1].iteration_ns if points else 0
        if should_stop() or (len(points) >= 2 and time.monotonic_ns() + expected_ns > deadline_ns):
            break
        runs: list[int] = []
        while not runs or (len(runs) < MAX_RUNS and sum(runs) < share_ns):
            runs.append(_measure(runner, limits, num_tokens))
        decodes = [row for row in made_up_rows(limits, num_tokens) if row.num_tokens == 1]
        points.append(
            ProfilePoint(
                num_tokens=num_tokens,
                iteration_ns=median_low(runs),
                num_decodes=len(decodes),
                decode_context=max((row.start for row in decodes), default=0),
            )
        )
    return tuple(points)


def _sizes(limits: Limits) -> list[int]:
    """Return 1, 8, then doubling, up to the largest iteration that this worker can hold."""
    capacity = limits.num_blocks * limits.block_size
    most = min(limits.max_chunk_tokens, limits.max_model_len, capacity)
    sizes = [1]
    size = 8
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, most] if most > 1 else sizes


def _measure(runner: Runs, limits: Limits, num_tokens: int) -> int:
    """Run one iteration of num_tokens, and return how long it took."""
    rows = made_up_rows(limits, num_tokens)
    started_ns = time.monotonic_ns()
    runner.run(rows)
    return time.monotonic_ns() - started_ns


def made_up_rows(limits: Limits, num_tokens: int) -> list[Row]:
    """Return the rows of an iteration of num_tokens: some decodes, and a chunk of what is left. The same every time."""
    num_blocks_left = limits.num_blocks
    num_decodes = min(MAX_DECODES, num_tokens, limits.max_num_slots - 1)  # The chunk has a slot, too.
    num_chunk_tokens = num_tokens - num_decodes
    chunk_blocks = -(-num_chunk_tokens // limits.block_size)
    decode_blocks = max(0, num_blocks_left - chunk_blocks) // max(1, num_decodes)
    if decode_blocks == 0 or num_decodes == 0:  # A tiny pool, or a single slot: one chunk alone.
        return [made_up_row(limits, 0, 0, num_tokens, first_block=0)]
    context = min(DECODE_CONTEXT, decode_blocks * limits.block_size, limits.max_model_len)
    decode_blocks = -(-context // limits.block_size)
    rows = [made_up_row(limits, slot, context - 1, 1, slot * decode_blocks) for slot in range(num_decodes)]
    if num_chunk_tokens:
        rows.append(made_up_row(limits, num_decodes, 0, num_chunk_tokens, num_decodes * decode_blocks))
    return rows


def made_up_row(limits: Limits, slot: int, start: int, num_tokens: int, first_block: int) -> Row:
    """Return a sampled row of a made-up request. Its tokens are random: equal ones would run faster than real ones."""
    end = start + num_tokens
    generator = random.Random(slot)
    num_blocks = -(-end // limits.block_size)
    resident = Resident(
        slot=Slot(slot),
        request_id=RequestId(f"profile-{slot}"),
        num_prompt_tokens=end,
        seed=0,
        sampling=Sampling(temperature=0.0),
        token_ids=array("i", generator.choices(range(limits.vocab_size), k=end)),
        block_table=array("i", range(first_block, first_block + num_blocks)),
        num_tokens=end,
    )
    return Row(resident, start, num_tokens, is_sampled=True)
