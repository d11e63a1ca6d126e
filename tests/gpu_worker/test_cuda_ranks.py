"""The device runner as several ranks, over real gloo: the tokens and scores of one, one ahead and without a wait."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from common.messages.requests import Sampling
from gpu_worker.attention.base import AttentionSpec
from gpu_worker.attention.paged import TorchPagedAttention
from gpu_worker.cuda.build import PoolOptions, build_runner
from gpu_worker.cuda.device import HostDevice
from gpu_worker.cuda.operations import TorchOperations
from gpu_worker.cuda.results import Computed, Launched
from gpu_worker.parallel.group import Group
from gpu_worker.parallel.layout import Layout
from gpu_worker.slots import Limits, Row
from tests.gpu_worker.device_world import GREEDY, DeviceWorld
from tests.gpu_worker.hf import TINY_VOCAB_SIZE, tiny_llama, tiny_of
from tests.gpu_worker.ranks import in_ranks, load_shard
from tests.gpu_worker.test_cuda_logprobs import assert_equal
from tests.gpu_worker.world import load, prompt

SAMPLINGS = {
    "greedy": GREEDY,
    "warm": Sampling(temperature=0.8, top_k=30, top_p=0.9, logprobs=2),
    "penalised": Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5),
    "scored": Sampling(temperature=0.0, logprobs=1, prompt_logprobs=2),
    "lone": GREEDY,
}
MAX_NUM_SLOTS = 4
"""Fewer than tokens that are scored at a time, so that the head takes them in pieces."""


def drive(world: DeviceWorld) -> list[Computed]:
    """Run a made-up service, two iterations in flight: prompts in chunks beside decodes, requests that come and go."""
    generator = random.Random(3)
    waiting = list(SAMPLINGS)
    computed: list[Computed] = []
    due: list[Launched] = []
    for _ in range(60):
        while waiting and len(world.residents) < MAX_NUM_SLOTS - 1:
            name = waiting.pop(0)
            length = 5 + 7 * len(computed) % 23
            world.add(name, prompt(length, seed=len(name)), room=20, sampling=SAMPLINGS[name], seed=len(name))
        batch: dict[str, int] = {}
        for name, resident in world.residents.items():
            left = resident.num_tokens - (resident.num_computed or 0)
            # Some sit out, so that batches of decodes are of all sizes.
            if count := min(left, generator.choice((0, 1, 1, 1, 6))):
                batch[name] = count
        if not batch:
            continue
        due.append(world.launch(batch)[1])
        if len(due) == 2:
            computed.append(due.pop(0).wait())
        for name in list(batch):
            resident = world.residents[name]
            if resident.num_tokens >= resident.num_prompt_tokens + 12:
                world.remove(name)  # Its last token is still on its way when another takes its slot.
    return [*computed, *(launched.wait() for launched in due)]


def assert_alike(computed: Sequence[Computed], expected: Sequence[Computed]) -> None:
    assert [each.token_ids for each in computed] == [each.token_ids for each in expected]
    for mine, theirs in zip(computed, expected, strict=True):
        assert_equal(mine.sampled_scores, theirs.sampled_scores)
        assert_equal(mine.prompt_scores, theirs.prompt_scores)


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (1, 3), (2, 2)])
def test_ranks_give_the_tokens_and_scores_of_one(tmp_path: Path, tp: int, pp: int, has_graphs: bool) -> None:
    # Fewer key-value heads than ranks of a stage, and a vocabulary that does not come apart evenly.
    tiny_llama(tmp_path, groups=4, vocab_size=TINY_VOCAB_SIZE - 1, max_position_embeddings=96)
    expected = drive(DeviceWorld(load(tmp_path), max_num_slots=MAX_NUM_SLOTS))
    assert sum(len(each.token_ids) for each in expected) > 40
    assert sum(len(each.prompt_scores) for each in expected) > 1
    layouts = []

    def run(layout: Layout, group: Group) -> list[Computed]:
        world = DeviceWorld(
            load_shard(tmp_path, layout),
            max_num_slots=MAX_NUM_SLOTS,
            has_graphs=has_graphs,
            group=group,
            vocab_size=TINY_VOCAB_SIZE - 1,
        )
        layouts.append(layout)
        return drive(world)

    by_rank = in_ranks(tp, pp, run)
    for layout in layouts:
        if layout.samples:
            assert_alike(by_rank[layout.rank], expected)
        else:
            assert not any(each.token_ids or each.sampled_scores for each in by_rank[layout.rank])


@pytest.mark.parametrize(("family", "tp", "pp"), [("qwen3", 2, 1), ("gemma3", 1, 2), ("mistral", 2, 2)])
def test_every_kind_of_layer_comes_apart(tmp_path: Path, family: str, tp: int, pp: int) -> None:
    tiny_of(family, tmp_path)
    expected = drive(DeviceWorld(load(tmp_path), max_num_slots=MAX_NUM_SLOTS))

    def run(layout: Layout, group: Group) -> list[Computed]:
        model = load_shard(tmp_path, layout)
        return drive(DeviceWorld(model, max_num_slots=MAX_NUM_SLOTS, group=group, vocab_size=TINY_VOCAB_SIZE))

    by_rank = in_ranks(tp, pp, run)
    sampling = next(rank for rank in range(tp * pp) if Layout(tp=tp, pp=pp, rank=rank).samples)
    assert_alike(by_rank[sampling], expected)


def test_a_token_that_comes_back_late_does_not_touch_who_has_its_slot_now(tmp_path: Path) -> None:
    tiny_llama(tmp_path, groups=3, max_position_embeddings=96)

    def two_requests(world: DeviceWorld) -> Computed:
        world.add("old", prompt(9), room=2)
        world.add("other", prompt(3), room=2)
        world.launch({"old": 9})[1].wait()  # The first stage is through; its token comes to position 9.
        world.remove("old")
        world.add("new", prompt(20, seed=1), room=2, sampling=Sampling(temperature=0.0, logprobs=3))
        # Two tokens are out now: before the next iteration the older one is taken.
        world.launch({"new": 4, "other": 3})[1].wait()
        return world.launch({"new": 16})[1].wait()

    expected = two_requests(DeviceWorld(load(tmp_path)))

    def run(layout: Layout, group: Group) -> Computed:
        return two_requests(DeviceWorld(load_shard(tmp_path, layout), group=group, vocab_size=TINY_VOCAB_SIZE))

    assert_alike([in_ranks(1, 2, run)[1]], [expected])


def test_a_stage_that_waits_for_another_counts_it_as_a_bubble_and_not_as_its_own_time(tmp_path: Path) -> None:
    tiny_llama(tmp_path, groups=3, max_position_embeddings=96)
    delay_s = 2.0
    gate = threading.Event()

    def run(layout: Layout, group: Group) -> Computed:
        world = DeviceWorld(load_shard(tmp_path, layout), group=group, vocab_size=TINY_VOCAB_SIZE)
        world.add("a", prompt(9), room=2)
        rows: list[Row] = world.rows({"a": 9})
        if layout.is_first_stage:
            gate.wait(60)
            threading.Event().wait(delay_s)
        else:
            gate.set()
        return world.runner.launch(rows).wait()

    first, last = in_ranks(1, 2, run)
    # On a busy machine it begins to wait a while after it has said so.
    assert last.bubble_ns > 0.5 * delay_s * 1e9 > last.device_ns
    assert first.bubble_ns < 0.5 * delay_s * 1e9


def test_the_pool_of_every_rank_is_as_large_as_the_poorest_one_can_hold(tmp_path: Path) -> None:
    tiny_llama(tmp_path, groups=4, max_position_embeddings=96)
    limits = Limits(
        vocab_size=TINY_VOCAB_SIZE, max_model_len=96, block_size=4, num_blocks=0, max_num_slots=4, max_chunk_tokens=64
    )

    def run(layout: Layout, group: Group) -> int:
        model = load_shard(tmp_path, layout)
        spec = AttentionSpec.of(model.config, device="cpu", dtype=torch.float32, block_size=4)
        device = HostDevice(memory_bytes=(1 << 31) + layout.rank * (1 << 20))
        options = PoolOptions(memory_share=0.9)
        runner, agreed = build_runner(
            device, model, TorchPagedAttention(), TorchOperations(), spec, limits, options, group
        )
        assert runner.kv_cache.num_blocks == agreed.num_blocks + 1
        assert runner.buckets == (1, 2, 4)
        return agreed.num_blocks

    agreed = in_ranks(2, 2, run)
    alone = in_ranks(1, 1, run)
    assert len(set(agreed)) == 1
    assert agreed[0] > alone[0] > 0  # Each holds the keys of half of the layers.
