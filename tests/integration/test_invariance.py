"""The same tokens whatever the chunk size, plan depth, neighbours and preemptions: the real scheduler core and plan
encoder drive the real runner, without processes between them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.ids import Slot
from common.messages.plans import Plan
from common.messages.requests import Sampling
from gpu_worker.loading import LoadedModel
from gpu_worker.runner import Outcome
from gpu_worker.sampler import Draw, adjust, noise
from gpu_worker.slots import Iteration, PlanState
from gpu_worker.slots import Row as WorkerRow
from services.scheduler.events import RequestPreempted
from tests.gpu_worker import world as worker_world
from tests.gpu_worker.hf import smollm2_or_skip, tiny_llama
from tests.services.scheduler.world import Row, World

TIE = 1e-4
"""Candidates closer than this are as good as tied (issue of float32 sums in another order)."""
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
WARM = Sampling(temperature=1.0, ignore_eos=True)
PENALISED = Sampling(
    temperature=1.0,
    ignore_eos=True,
    presence_penalty=2.0,
    frequency_penalty=1.0,
    repetition_penalty=1.3,
    logit_bias=((7, 3.0),),
)
NUM_OUTPUT_TOKENS = 14
PROMPT_LENS = {"a": 1, "b": 9, "c": 33, "d": 70}


class ModelDevice:
    """A worker without a process: plans go through its bookkeeping into the model."""

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int) -> None:
        world = worker_world.World(model, block_size=block_size, num_blocks=num_blocks)
        self._runner = world.runner
        self._state = PlanState(world.limits)
        self.distances: dict[tuple[str, int], float] = {}  # request, position -> between its best two candidates

    def run(self, plan: Plan) -> tuple[list[Row], list[tuple[Slot, int]]]:
        iteration = self._state.apply(plan)
        assert isinstance(iteration, Iteration), iteration
        with torch.inference_mode():
            logits = self._runner.logits(iteration.rows)
            sampled = [row for row in iteration.rows if row.is_sampled]
            for row, row_logits in zip(sampled, logits, strict=True):
                key = (row.resident.request_id, row.start + row.num_tokens)
                self.distances[key] = distance(row_logits, row)
            outcome = Outcome()
            self._runner.draw(iteration.rows, logits, outcome)
        rows = [Row(row.resident.request_id, row.start, row.num_tokens, row.is_sampled) for row in iteration.rows]
        return rows, list(zip(outcome.slots, outcome.token_ids, strict=True))


def distance(logits: Tensor, row: WorkerRow) -> float:
    """Between the best two candidates, with their penalties, and their noise where there is a temperature."""
    resident, position = row.resident, row.start + row.num_tokens
    sampling, seed = resident.sampling, resident.seed
    scores = logits.float().clone()
    adjust(scores, Draw(sampling, seed, position, resident.num_prompt_tokens, resident.token_ids))
    if sampling.temperature > 0:
        scores = scores / sampling.temperature + noise(seed, position, torch.arange(len(scores)))
    best = scores.topk(2).values
    return float(best[0] - best[1])


@pytest.fixture(scope="module", params=[1, 3, 4])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama(path, groups=request.param)
    return worker_world.load(path)


def generate(
    model: LoadedModel,
    names: list[str],
    sampling: Sampling,
    *,
    num_blocks: int = 256,
    block_size: int = 4,
    **limits: Any,
) -> tuple[dict[str, list[int]], dict[tuple[str, int], float], World]:
    """Outputs by request, distances, and the world that made them."""
    device = ModelDevice(model, num_blocks, block_size)
    world = World(
        num_blocks=num_blocks, block_size=block_size, max_num_slots=64, make_device=lambda _: device, **limits
    )
    for name in names:
        length = PROMPT_LENS[name]
        tokens = worker_world.prompt(length, seed=length)
        world.arrive(
            name, prompt_len=length, tokens=tokens, max_tokens=NUM_OUTPUT_TOKENS, sampling=sampling, seed=length
        )
    world.drain()
    world.check_drained()
    return world.output, device.distances, world


def check_equal(
    got: dict[str, list[int]], expected: dict[str, list[int]], distances: dict[tuple[str, int], float]
) -> int:
    """Equal up to the first position that is as good as tied; how many requests parted there."""
    num_ties = 0
    for name, tokens in got.items():
        if tokens == expected[name]:
            continue
        first = next(index for index, token in enumerate(tokens) if token != expected[name][index])
        assert distances[name, PROMPT_LENS[name] + first] < TIE, f"{name} parts at token {first} without a tie"
        print(f"{name} parts at token {first}: distance {distances[name, PROMPT_LENS[name] + first]:.1e}")
        num_ties += 1
    return num_ties


def alone(model: LoadedModel, sampling: Sampling, **limits: Any) -> tuple[dict[str, list[int]], Any]:
    outputs: dict[str, list[int]] = {}
    distances: dict[tuple[str, int], float] = {}
    for name in PROMPT_LENS:
        output, seen, _ = generate(model, [name], sampling, token_budget=4096, **limits)
        outputs |= output
        distances |= seen
    return outputs, distances


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_tokens_do_not_depend_on_chunks_depth_or_neighbours(tiny: LoadedModel, sampling: Sampling) -> None:
    expected, distances = alone(tiny, sampling)
    num_ties = 0
    for token_budget in (1, 7, 64, 512):
        for depth in (1, 2):
            got, _, _ = generate(tiny, list(PROMPT_LENS), sampling, token_budget=token_budget, depth=depth)
            num_ties += check_equal(got, expected, distances)
    assert num_ties <= 2, "of 32 outputs"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("has_prefix_cache", [False, True], ids=["recomputed", "from the cache"])
def test_a_preemption_half_way_changes_nothing(
    tiny: LoadedModel, sampling: Sampling, depth: int, has_prefix_cache: bool
) -> None:
    expected, distances = alone(tiny, sampling)
    got, _, world = generate(
        tiny,
        list(PROMPT_LENS),
        sampling,
        token_budget=64,
        depth=depth,
        num_blocks=36,
        overcommit=10.0,
        has_prefix_cache=has_prefix_cache,
    )
    preempted = [effect for effect in world.effects if isinstance(effect, RequestPreempted)]
    assert preempted, "the pool is too small for all four"
    assert any(effect.num_tokens > PROMPT_LENS[effect.request_id] for effect in preempted), "half-way"
    assert check_equal(got, expected, distances) <= 1


def test_penalties_count_the_same_tokens_after_a_preemption(tiny: LoadedModel) -> None:
    expected, distances = alone(tiny, PENALISED)
    got, _, world = generate(
        tiny, list(PROMPT_LENS), PENALISED, token_budget=64, depth=2, num_blocks=36, overcommit=10.0
    )
    assert any(isinstance(effect, RequestPreempted) for effect in world.effects)
    assert check_equal(got, expected, distances) <= 1


def test_a_refused_plan_and_a_lost_worker_change_nothing(tiny: LoadedModel) -> None:
    expected, distances = alone(tiny, WARM)
    devices: list[ModelDevice] = []

    def make_device(_: object) -> ModelDevice:
        devices.append(ModelDevice(tiny, 256, 4))
        return devices[-1]

    world = World(num_blocks=256, max_num_slots=64, token_budget=16, depth=2, make_device=make_device)
    for name, length in PROMPT_LENS.items():
        tokens = worker_world.prompt(length, seed=length)
        world.arrive(name, prompt_len=length, tokens=tokens, max_tokens=NUM_OUTPUT_TOKENS, sampling=WARM, seed=length)
    for _ in range(8):
        world.finish_iteration()
    world.refuse(next(iter(world.devices)))
    for _ in range(4):
        world.finish_iteration()
    world.lose(next(iter(world.devices)))
    world.join()
    world.drain()

    assert all(world.output.values())
    assert check_equal(world.output, expected, distances) <= 1


def test_smollm2_gives_the_same_tokens_in_chunks_of_7_and_512_and_at_both_depths() -> None:
    smollm2_or_skip()
    model = worker_world.load_named("smollm2")
    expected, distances = alone(model, GREEDY, block_size=16)
    num_ties = 0
    for token_budget, depth in ((7, 2), (512, 1)):
        got, _, _ = generate(model, list(PROMPT_LENS), GREEDY, token_budget=token_budget, depth=depth, block_size=16)
        num_ties += check_equal(got, expected, distances)
    assert num_ties <= 1
