"""What ranks cost and what micro-batches save: one process, shares and stages, side by side on this machine's CPU.

    python -m tests.bench.bench_parallel

Each worker decodes the same streams. With stages they run once as one batch, each plan one ahead, and once as two
micro-batches that take turns, with three plans in flight. Prints tokens a second and the share of the stages' time that
was bubbles.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.ids import Slot
from common.messages import Plan
from common.messages.plans import PlanChunk
from tests.gpu_worker.test_parallel_process import ranks
from tests.gpu_worker.test_worker_process import Scheduler, new, scheduler_at
from tests.gpu_worker.world import prompt
from tests.ports import free_address

NUM_STREAMS = 8
PROMPT_LEN = 16
NUM_BLOCKS = 12
"""Of 16 tokens, for each stream."""
NUM_TURNS = 100
WARM_UP_TURNS = 20
ROUNDS = 3


def model(path: Path) -> None:
    """Save a random model of 27 M parameters: wide enough that an iteration is more than its overhead."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)


async def measure(scheduler: Scheduler, epoch: int, num_groups: int) -> tuple[float, float]:
    """Return tokens a second and the share of bubbles, with the streams in so many micro-batches."""
    groups = [range(first, NUM_STREAMS, num_groups) for first in range(num_groups)]

    def plan(iteration: int) -> Plan:
        turn, group = divmod(iteration, num_groups)
        slots = [Slot(slot) for slot in groups[group]]
        start, num_tokens = (0, PROMPT_LEN) if turn == 0 else (PROMPT_LEN + turn - 1, 1)
        return Plan(
            epoch=epoch,
            iteration=iteration,
            introduced=tuple(
                new(slot, prompt(PROMPT_LEN, slot), first_block=slot * NUM_BLOCKS, num_blocks=NUM_BLOCKS)
                for slot in slots
            )
            if turn == 0
            else (),
            chunks=tuple(PlanChunk(slot, start, num_tokens, True) for slot in slots),
        )

    num_ahead = num_groups + 1
    num_plans = NUM_TURNS * num_groups
    for iteration in range(num_ahead):
        scheduler.peer.send(plan(iteration))
    started_s = busy_ns = bubble_ns = 0.0
    for iteration in range(num_plans):
        done = await scheduler.done()
        if iteration + num_ahead < num_plans:
            scheduler.peer.send(plan(iteration + num_ahead))
        if iteration == WARM_UP_TURNS * num_groups:
            started_s = time.monotonic()
        elif iteration > WARM_UP_TURNS * num_groups:
            busy_ns += done.device_ns
            bubble_ns += done.bubble_ns
    num_tokens = (num_plans - WARM_UP_TURNS * num_groups - 1) * NUM_STREAMS / num_groups
    return num_tokens / (time.monotonic() - started_s), bubble_ns / (busy_ns + bubble_ns)


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model(Path(directory))
        own: tuple[str, ...] = (
            "--threads",
            "1",
            "--kv-tokens",
            str(16 * NUM_BLOCKS * NUM_STREAMS),
            "--attention-backend",
            "cpu",
        )
        own += ("--max-chunk-tokens", "256")
        for name, flags, groupings in (
            ("one process, one thread", (), (1,)),
            ("tp 2", ("--tp", "2"), (1,)),
            ("pp 2", ("--pp", "2"), (1, 2)),
        ):
            address = free_address()
            with ranks(address, Path(directory), *own, *flags):
                async with scheduler_at(address) as scheduler:
                    await scheduler.connected()
                    for num_groups in groupings:
                        runs = [
                            await measure(scheduler, epoch, num_groups)
                            for epoch in range(10 * num_groups, 10 * num_groups + ROUNDS)
                        ]
                        rate, bubbles = sorted(runs)[ROUNDS // 2]
                        print(f"{name}, {num_groups} micro-batch(es): {rate:.0f} tokens/s, {bubbles:.0%} bubbles")


if __name__ == "__main__":
    asyncio.run(main())
