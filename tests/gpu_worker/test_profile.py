"""What a worker measures when it starts."""

from pathlib import Path

import pytest

from gpu_worker.loading import LoadedModel
from gpu_worker.profile import profile
from tests.gpu_worker.hf import tiny_llama
from tests.gpu_worker.world import World, load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny_llama(path)
    return load(path)


def sizes(world: World, seconds: float, *, should_stop: bool = False) -> list[int]:
    points = profile(world.runner, world.limits, seconds, lambda: should_stop)
    assert all(point.iteration_ns > 0 for point in points)
    return [point.num_tokens for point in points]


def test_sizes_double_up_to_the_largest_iteration(model: LoadedModel) -> None:
    world = World(model, num_blocks=1024)  # of 4: more than the 1024 positions of the model
    assert sizes(world, 300.0) == [1, 8, 16, 32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize(("num_blocks", "largest"), [(1, 4), (2, 8), (9, 36), (70, 280)])
def test_a_pool_bounds_the_largest_size(model: LoadedModel, num_blocks: int, largest: int) -> None:
    measured = sizes(World(model, num_blocks=num_blocks), 300.0)
    assert measured[-1] == largest
    assert measured == sorted(set(measured))


def test_without_time_there_are_still_two_points_and_a_stop_ends_at_once(model: LoadedModel) -> None:
    assert sizes(World(model), 1e-9) == [1, 8]
    assert sizes(World(model), 300.0, should_stop=True) == []


def test_measuring_leaves_only_finite_numbers_in_the_pool(model: LoadedModel) -> None:
    world = World(model)
    sizes(world, 0.1)
    for pool in (*world.runner.kv_cache.keys, *world.runner.kv_cache.values):
        assert pool.isfinite().all()
