"""A worker that runs requests always has a plan, whatever its streams' deadlines and however few its blocks."""

import random

import pytest

from tests.services.scheduler.world import World

MS = 1_000_000


@pytest.mark.parametrize("seed", [*range(12), 486, 937, 1163])
def test_a_worker_with_requests_always_has_a_plan(seed: int) -> None:
    """In the last three, streams sit an iteration out for the sake of one that then finds no block."""
    rng = random.Random(seed)
    world = World(
        num_blocks=rng.randrange(8, 20),
        token_budget=None,
        depth=rng.choice((1, 2)),
        tbt_target_ns=rng.choice((5, 20, 60)) * MS,
        max_num_slots=8,
    )
    num_arrived = 0
    for _ in range(80):
        if rng.random() < 0.3 and num_arrived < 30:
            world.arrive(
                f"r{num_arrived}",
                prompt_len=rng.randrange(1, 16),
                max_tokens=rng.randrange(2, 24),
                tbt_target_ms=rng.choice((None, None, 5.0, 500.0, 5000.0)),
            )
            num_arrived += 1
        if any(world.plans.values()):
            world.finish_iteration(took_ns=rng.choice((1, 4, 15, 40)) * MS)
        (worker,) = world.core.workers
        assert worker.in_flight or not worker.running
    world.drain()
