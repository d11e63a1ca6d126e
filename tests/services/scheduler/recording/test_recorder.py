"""What is on disk is what happened, whatever happens to the disk or the process."""

import os
import re
import stat
import time
from pathlib import Path

import pytest

from common.ids import InstanceId, RequestId
from common.messages.requests import Cancel
from services.scheduler.events import RequestPreempted, TimerFired
from services.scheduler.placement import Placer
from services.scheduler.recording import recorder as recorder_module
from services.scheduler.recording import segment as segment_module
from services.scheduler.recording.files import SegmentFile, prune, segments_of
from services.scheduler.recording.replay import main, replay
from services.scheduler.recording.segment import MAGIC, BadRecording, Segment, StepDecoder, event_of
from tests.services.scheduler.recording.recorded import busy, recorded, recorded_world


def test_every_event_and_effect_is_on_disk_in_order(tmp_path: Path) -> None:
    world, recorder = recorded_world(tmp_path, num_blocks=10)
    seen = len(world.effects)  # The world's worker joined before the recording began.
    busy(world)
    recorder.close()
    (segment,) = recorded(tmp_path)
    steps, decoder = list(segment.steps()), StepDecoder()
    assert [effect for step in steps for effect in decoder.effects(step)] == world.effects[seen:]
    assert any(isinstance(effect, RequestPreempted) for effect in world.effects), "the world was tight enough"
    assert event_of(steps[0]).request_id == "request-0"  # type: ignore[union-attr]
    assert recorder.num_lost == 0


def test_a_recording_replays_and_its_first_changed_effect_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, recorder = recorded_world(tmp_path, num_blocks=10)
    busy(world)
    recorder.close()
    assert main([str(tmp_path)]) == 0
    assert "all equal" in capsys.readouterr().out
    monkeypatch.setattr(Placer, "_first_need", lambda self, request: request.max_len - 1)
    assert main([str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert re.search(r"step \d+, \w+ at \d+ ns", told)
    assert "recorded: RunIteration" in told


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_segment_begins_in_the_middle_of_things_and_replays_by_itself(tmp_path: Path, num_stages: int) -> None:
    world, recorder = recorded_world(tmp_path, num_blocks=10, num_workers=2, depth=2, pipeline_parallel=num_stages)
    for round_ in range(4):
        world.arrive(f"long-{round_}", prompt_len=20, max_tokens=10)
        busy(world, num_requests=2, first=10 * round_)
        world.arrive(f"open-{round_}", prompt_len=20, max_tokens=10)
        world.finish_iteration()
        recorder.begin(world.now_ns)
    busy(world, first=100)
    recorder.close()
    segments = recorded(tmp_path)
    assert len(segments) == 5
    assert segments[1].core().num_open == 1
    assert sum(replay(segment).num_steps for segment in segments) > 50


def test_a_killed_process_leaves_all_but_the_torn_end(tmp_path: Path) -> None:
    world, recorder = recorded_world(tmp_path)
    busy(world)
    recorder.close()
    (path,) = segments_of(tmp_path)
    whole = replay(Segment(path))
    data = path.read_bytes()
    frames = SegmentFile(tmp_path, InstanceId("scheduler-1"))
    os.truncate(path, len(data) - 1)
    torn = replay(Segment(path))
    assert torn.is_torn
    assert not whole.is_torn
    assert torn.num_steps < whole.num_steps
    # A bit that has turned is seen as well.
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert replay(Segment(path)).num_steps == torn.num_steps
    frames.close()


def test_steps_before_the_torn_frame_are_all_there(tmp_path: Path) -> None:
    world, recorder = recorded_world(tmp_path)
    world.arrive("first", prompt_len=4)
    _wait_until_written(recorder)
    world.drain()
    recorder.close()
    (path,) = segments_of(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    assert [step.kind for step in Segment(path).steps()] == ["RequestArrived"]


def test_the_event_that_the_core_died_of_is_recorded_and_kills_it_again(tmp_path: Path) -> None:
    world, recorder = recorded_world(tmp_path)
    world.arrive("chat", prompt_len=4)
    world.core.workers[0].pool.num_reserved = -(10**9)  # A bug, planted in the state that the segment begins with.
    recorder.begin(world.now_ns)
    world.core.workers[0].running[0].has_ended = True
    recorder.begin(world.now_ns)
    with pytest.raises(AssertionError):
        world.core.step(Cancel(request_ids=(RequestId("chat"),)), world.now_ns)
    recorder.close()
    done = replay(recorded(tmp_path)[-1])
    assert "AssertionError" in done.raised
    assert done.num_by_event == {"Cancel": 1}


@pytest.mark.parametrize("content", [b"", b"something else", b"legato recording 1\n", MAGIC, MAGIC + b"\x04\0"])
def test_a_file_that_is_no_recording_is_refused_with_its_name(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.legato"
    path.write_bytes(content)
    assert main([str(path)]) == 2
    assert "odd.legato" in capsys.readouterr().err


def test_a_recording_of_other_code_is_refused_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, recorder = recorded_world(tmp_path)
    busy(world)
    recorder.close()
    monkeypatch.setattr("services.scheduler.recording.replay.code_version", lambda: "9.9+ffff")
    assert main([str(tmp_path)]) == 2
    assert "9.9+ffff" in capsys.readouterr().err
    assert main([str(tmp_path), "--other-code"]) == 0


def test_files_are_its_owners_alone_and_their_sum_is_bounded(tmp_path: Path) -> None:
    directory = tmp_path / "ring"
    max_bytes = 40_000
    world, recorder = recorded_world(directory, max_bytes=max_bytes)
    for round_ in range(30):
        busy(world, num_requests=3, first=10 * round_)
        recorder.begin(world.now_ns)
    recorder.close()
    paths = segments_of(directory)
    assert 1 < len(paths) < 30
    assert sum(path.stat().st_size for path in paths) <= max_bytes
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert replay(Segment(paths[-2])).num_steps > 0


def test_recordings_too_old_are_deleted_and_the_current_one_never(tmp_path: Path) -> None:
    old, kept = tmp_path / "a.legato", tmp_path / "b.legato"
    for path in (old, kept):
        path.write_bytes(b"x")
        os.utime(path, (time.time() - 100, time.time() - 100))
    prune(tmp_path, max_bytes=10**9, max_age_s=50, keep=kept)
    assert [path.name for path in tmp_path.iterdir()] == ["b.legato"]


def test_a_folder_that_cannot_be_written_costs_the_recording_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    world, recorder = recorded_world(tmp_path / "file")
    _wait_until_written(recorder)
    busy(world)
    recorder.close()
    assert recorder.num_lost > 0
    assert len(world.terminals) == 8


def test_a_disk_that_falls_behind_loses_steps_and_then_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_WAITING_STEPS", 20)
    monkeypatch.setattr(recorder_module, "RETRY_S", 0.0)
    world, recorder = recorded_world(tmp_path)
    busy(world)
    assert recorder.num_lost > 0
    _wait_until_written(recorder)
    monkeypatch.setattr(recorder_module, "MAX_WAITING_STEPS", 10**6)
    world.core.step(TimerFired(), world.now_ns)  # Lost, too; a segment begins behind it.
    busy(world, first=50)
    recorder.close()
    last = replay(recorded(tmp_path)[-1])
    assert last.num_steps > 10


def test_an_event_of_another_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, recorder = recorded_world(tmp_path)
    busy(world)
    recorder.close()
    monkeypatch.delitem(segment_module.EVENTS, "RequestArrived")
    with pytest.raises(BadRecording, match="RequestArrived"):
        replay(recorded(tmp_path)[0])


def _wait_until_written(recorder: recorder_module.Recorder) -> None:
    deadline = time.monotonic() + 30
    while not recorder.is_idle:
        assert time.monotonic() < deadline, "the thread writes nothing"
        time.sleep(0.01)
