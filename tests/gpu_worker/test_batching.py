"""What a request gets does not depend on how its tokens are chunked, on its neighbours, or on where its blocks lie."""

from pathlib import Path

import pytest
import torch

from common.ids import BlockId
from common.messages.requests import Sampling
from gpu_worker.loading import LoadedModel
from tests.gpu_worker.hf import tiny_llama
from tests.gpu_worker.world import BACKEND_NAMES, GREEDY, World, load, prompt

TOLERANCE = 1e-4
"""Matrix products of another number of rows sum in another order."""
WARM = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama(path, groups=3)
    return load(path)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("chunk_len", [1, 7, 64, 512])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_prefill_in_any_chunking_equals_one_shot_prefill(
    model: LoadedModel, chunk_len: int, sampling: Sampling, backend: str
) -> None:
    tokens = prompt(150)
    chunked, whole = World(model, backend=backend), World(model, backend=backend, seed=1)
    for world in (chunked, whole):
        world.add("a", tokens, sampling=sampling, seed=3, room=8)
    first = chunked.prefill("a", chunk_len)
    assert first == whole.prefill("a", 150)
    torch.testing.assert_close(chunked.logits["a"], whole.logits["a"], atol=TOLERANCE, rtol=TOLERANCE)
    assert chunked.generate(["a"], 8) == whole.generate(["a"], 8)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_requests_tokens_do_not_depend_on_its_neighbours(
    model: LoadedModel, sampling: Sampling, backend: str
) -> None:
    lengths = {f"of {length}": length for length in (1, 2, 5, 9, 17, 40, 100)}
    alone: dict[str, list[int]] = {}
    for name, length in lengths.items():
        world = World(model, backend=backend)
        world.add(name, prompt(length), sampling=sampling, seed=length, room=10)
        alone |= world.generate([name], 10)

    world = World(model, backend=backend)
    together: dict[str, list[int]] = {}
    for name, length in lengths.items():
        world.add(name, prompt(length), sampling=sampling, seed=length, room=10)
        together[name] = []
    world.add("document", prompt(100), room=20)
    # Prompts enter one by one beside what already decodes and beside a long prompt in chunks of 9: hybrid batches.
    rest = dict.fromkeys(lengths, 10)
    waiting = dict(lengths)
    running: list[str] = []
    while any(rest.values()):
        batch = {name: 1 for name in running if rest[name]}
        if waiting:
            name = next(iter(waiting))
            batch[name] = waiting.pop(name)
            running.append(name)
        if left := world.num_left("document"):
            batch["document"] = min(9, left)
        for name, token in world.iterate(batch).items():
            if name in rest:
                together[name].append(token)
                rest[name] -= 1
    assert together == alone


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_blocks_that_nobody_owns_are_never_read(model: LoadedModel, backend: str) -> None:
    clean, poisoned = World(model, backend=backend, seed=1), World(model, backend=backend, seed=2)
    # Block 0 is what a careless padding reads. Lengths near each other share a padded group, 1 and 77 do not.
    poisoned.free_blocks.remove(BlockId(0))
    poisoned.free_blocks.append(BlockId(0))
    lengths = (1, 22, 30, 37, 77)
    for world in (clean, poisoned):
        for length in lengths:
            world.add(str(length), prompt(length), room=8)
    for pool in (*poisoned.runner.kv_cache.keys, *poisoned.runner.kv_cache.values):
        pool[poisoned.free_blocks] = float("nan")
    names = [str(length) for length in lengths]
    assert poisoned.generate(names, 8) == clean.generate(names, 8)
    for name in names:
        torch.testing.assert_close(poisoned.logits[name], clean.logits[name], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_an_iteration_writes_only_to_the_blocks_of_its_requests(model: LoadedModel, backend: str) -> None:
    world = World(model, backend=backend)
    world.add("a", prompt(30), room=8)
    for pool in (*world.runner.kv_cache.keys, *world.runner.kv_cache.values):
        pool[world.free_blocks] = 7.0
    world.generate(["a"], 8)
    for pool in (*world.runner.kv_cache.keys, *world.runner.kv_cache.values):
        assert (pool[world.free_blocks] == 7.0).all()


def test_a_request_placed_again_with_its_output_continues_as_it_would_have(model: LoadedModel) -> None:
    tokens = prompt(20)
    undisturbed, again = World(model), World(model, seed=1)
    undisturbed.add("a", tokens, sampling=WARM, seed=9, room=12)
    output = undisturbed.generate(["a"], 12)["a"]
    again.add("a", tokens + output[:5], sampling=WARM, seed=9, num_prompt_tokens=20, room=7)
    assert output[:5] + again.generate(["a"], 7)["a"] == output
