"""A scheduler's world with the recorder on, and what its files hold."""

from pathlib import Path
from typing import Any

from common.ids import InstanceId
from services.scheduler.core import SchedulerCore
from services.scheduler.events import Effect, Event
from services.scheduler.recording.files import segments_of
from services.scheduler.recording.recorder import Recorder
from services.scheduler.recording.segment import Segment
from tests.services.scheduler.world import World


class RecordedCore:
    """A core as the shell drives it: each step is recorded when its effects have been carried out."""

    def __init__(self, core: SchedulerCore, recorder: Recorder) -> None:
        self._core = core
        self.recorder = recorder

    def step(self, event: Event, now_ns: int) -> tuple[Effect, ...]:
        try:
            effects = self._core.step(event, now_ns)
        except Exception:
            self.recorder.record(event, None, now_ns)
            raise
        self.recorder.record(event, effects, now_ns)
        return effects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def recorded_world(directory: Path, *, max_bytes: int = 10**9, **world: Any) -> tuple[World, Recorder]:
    """A world, and the recorder of all that happens in it from now on."""
    made = World(**world)
    core = made.core
    recorder = Recorder(directory, core, core._limits, InstanceId("scheduler-0"), max_bytes=max_bytes, max_age_s=3600.0)
    recorder.begin(made.now_ns)
    made.core = RecordedCore(core, recorder)  # type: ignore[assignment]
    return made, recorder


def busy(world: World, *, num_requests: int = 8, first: int = 0) -> None:
    """Requests that share a small pool, until all have ended; some are preempted."""
    for index in range(first, first + num_requests):
        world.arrive(f"request-{index}", prompt_len=6 + index % 5, max_tokens=12)
        world.finish_iteration()
    world.cancel(f"request-{first}")
    world.drain()


def recorded(directory: Path) -> list[Segment]:
    """The segments on disk, oldest first."""
    return [Segment(path) for path in segments_of(directory)]
