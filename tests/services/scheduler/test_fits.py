"""What is learned of a device and a model is there at the next start, for the same layout and no other."""

from pathlib import Path

import msgspec
import pytest

from services.scheduler.fits import LEAST_MEASURED, load_fit, save_fit
from services.scheduler.worker import Worker
from tests.services.scheduler.world import World


def taught(num_measured: int) -> Worker:
    """A worker whose iterations took twice as long as its figures say."""
    (worker,) = World().core.workers
    terms = (1e6, 2e6, 1e6, 3e6, 1e6, 1e6)
    for _ in range(num_measured):
        worker.fit.learn(terms, 2 * sum(terms))
    return worker


def test_a_fit_that_was_saved_is_loaded_at_the_next_start(tmp_path: Path) -> None:
    worker = taught(LEAST_MEASURED)
    save_fit(tmp_path / "fits", worker)
    assert load_fit(tmp_path / "fits", worker.card) == worker.fit.save()


@pytest.mark.parametrize(
    "change",
    [
        {"device": "another"},
        {"dtype": "bfloat16"},
        {"attention": "another"},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_device_or_layout_has_a_fit_of_its_own(tmp_path: Path, change: dict[str, str | int]) -> None:
    worker = taught(LEAST_MEASURED)
    save_fit(tmp_path, worker)
    assert load_fit(tmp_path, msgspec.structs.replace(worker.card, **change)) is None


def test_a_fit_that_has_seen_little_is_not_kept(tmp_path: Path) -> None:
    worker = taught(LEAST_MEASURED - 1)
    save_fit(tmp_path, worker)
    assert load_fit(tmp_path, worker.card) is None


def test_a_file_that_is_no_fit_is_ignored(tmp_path: Path) -> None:
    worker = taught(LEAST_MEASURED)
    save_fit(tmp_path, worker)
    (path,) = tmp_path.iterdir()
    path.write_text("{}")
    assert load_fit(tmp_path, worker.card) is None
