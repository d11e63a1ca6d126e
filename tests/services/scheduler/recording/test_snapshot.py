"""A core that is put on disk and back goes on as if nothing had happened."""

from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import settings

from common.ids import RequestId
from common.messages.requests import Cancel
from services.scheduler.core import SchedulerCore
from services.scheduler.events import Effect, Event
from services.scheduler.limits import Limits
from services.scheduler.recording.code import MODULES
from services.scheduler.recording.snapshot import SLICE, Node, NotSnapshotable, encode_nodes, restore, take_snapshot
from tests.services.scheduler.test_properties import SchedulerMachine
from tests.services.scheduler.world import World
from tests.test_architecture import ROOT, imports_of


def on_disk(nodes: list[Node]) -> list[Node]:
    """Nodes as they come back from bytes."""
    return [msgspec.msgpack.decode(data) for data in encode_nodes(nodes)]


class Twins:
    """A core, and beside it one that is put into bytes and back before every step. Both must answer alike."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core = core

    def step(self, event: Event, now_ns: int) -> tuple[Effect, ...]:
        twin = restore(on_disk(take_snapshot(self.core)))
        answer = twin.step(event, now_ns)
        effects = self.core.step(event, now_ns)
        assert answer == effects
        return effects

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)


class SnapshotMachine(SchedulerMachine):
    """All that can happen to a scheduler, with a snapshot before every event."""

    def watch(self) -> None:
        self.world.core = Twins(self.world.core)  # type: ignore[assignment]


SnapshotMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
test_snapshots = SnapshotMachine.TestCase


class PipelineSnapshotMachine(SnapshotMachine):
    num_stages = 2


PipelineSnapshotMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)
test_snapshots_of_a_pipeline = PipelineSnapshotMachine.TestCase


def test_a_snapshot_of_a_running_core_restores_to_equal_nodes() -> None:
    world = World(num_workers=2, depth=2)
    for index in range(6):
        world.arrive(f"request-{index}", prompt_len=5 + index, max_tokens=9)
    for _ in range(4):
        world.finish_iteration()
    nodes = on_disk(take_snapshot(world.core))
    assert any(worker.in_flight for worker in world.core.workers), "plans are in flight"
    assert on_disk(take_snapshot(restore(nodes))) == nodes


def test_a_pool_of_many_blocks_comes_back_block_by_block() -> None:
    world = World(num_blocks=3 * SLICE + 5)
    world.arrive("long", prompt_len=40, max_tokens=4)
    world.drain()
    (worker,) = world.core.workers
    (twin,) = restore(on_disk(take_snapshot(world.core))).workers
    assert vars(twin.pool) == vars(worker.pool)


def test_a_long_list_with_something_else_in_it_is_refused() -> None:
    core = SchedulerCore(Limits(tbt_target_ns=1))
    core._stray = [0] * SLICE + [core]  # type: ignore[attr-defined]
    with pytest.raises(NotSnapshotable, match="a long"):
        on_disk(take_snapshot(core))


def test_a_bounded_deque_keeps_its_bound() -> None:
    core = SchedulerCore(Limits(tbt_target_ns=1))
    core._recent = deque([core, core], maxlen=2)  # type: ignore[attr-defined]
    recent = restore(on_disk(take_snapshot(core)))._recent  # type: ignore[attr-defined]
    recent.append(7)
    assert list(recent)[1:] == [7]
    assert len(recent) == 2


def test_every_module_of_ours_that_the_core_stands_on_is_known() -> None:
    found, left = set(), ["services.scheduler.core"]
    while left:
        name = left.pop()
        path = ROOT / f"{name.replace('.', '/')}.py"
        path = path if path.is_file() else ROOT / name.replace(".", "/") / "__init__.py"
        if name in found or not name.startswith(("common.", "services.")) or not path.is_file():
            continue
        found.add(name)
        left += imports_of(path)
    stateless = {"common.messages", "services.scheduler.kv"}  # They only gather names.
    assert len(found) > 25
    assert found - stateless <= set(MODULES)


def test_what_the_core_should_not_hold_is_refused_by_name() -> None:
    core = SchedulerCore(Limits(tbt_target_ns=1))
    core._stray = open  # type: ignore[attr-defined]
    with pytest.raises(NotSnapshotable, match="builtin_function_or_method"):
        take_snapshot(core)


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [["object", "os.system", [], []]],
        [["object", "subprocess.Popen", ["args"], ["true"]]],
        [["list", [[7]]]],
        [["list", []]],
        [["long", "list", [1]]],
        [["more", 0, [1]]],
        [["frozen", "common.messages.requests.Stamps", {"a": 1}]],
        [["object", "common.messages.requests.Stamps", ["worker_id"], ["w"]]],
        [["tuple", [[0]]]],
        [["object", "services.scheduler.core.SchedulerCore", ["a", "b"], [1]]],
    ],
)
def test_a_file_can_make_nothing_but_a_core(nodes: list[Any]) -> None:
    with pytest.raises(NotSnapshotable):
        restore(nodes)


def test_a_restored_core_shares_nothing_with_the_one_it_was_taken_of() -> None:
    world = World()
    world.arrive("chat", prompt_len=4)
    nodes = take_snapshot(world.core)
    world.drain()
    nodes = on_disk(nodes)
    late = restore(nodes).step(Cancel(request_ids=(RequestId("chat"),)), world.now_ns)
    assert late, "there the request is still open"
