"""A recorded load, simulated: the same requests, under the settings that are asked for."""

from pathlib import Path

import pytest

from loadtest.whatif.causes import LateGaps
from loadtest.whatif.cli import main, simulate
from loadtest.whatif.past import read_past
from services.scheduler.recording.files import segments_of
from tests.services.scheduler.recording.recorded import recorded_world

NUM_REQUESTS = 8
OUTPUT_LEN = 12


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """Requests on one worker, one of which was open when the segment began."""
    world, recorder = recorded_world(tmp_path, num_blocks=200, token_budget=None, tbt_target_ns=500_000_000)
    world.arrive("early", prompt_len=8, max_tokens=OUTPUT_LEN)
    for _ in range(3):
        world.finish_iteration()
    recorder.begin(world.now_ns)
    for index in range(NUM_REQUESTS):
        world.arrive(f"request-{index}", prompt_len=6 + index, max_tokens=OUTPUT_LEN)
        world.finish_iteration()
    world.drain()
    world.wait(30.0)
    world.arrive("late", prompt_len=4, max_tokens=1)
    world.drain()
    recorder.close()
    return segments_of(tmp_path)[-1]


def test_the_past_has_every_request_with_the_length_that_it_had(segment: Path) -> None:
    past = read_past(segment)
    assert past.num_open_at_start == 1
    assert [request.arrived.request_id for request in past.requests] == [
        "early",
        *(f"request-{index}" for index in range(NUM_REQUESTS)),
        "late",
    ]
    assert [request.num_output_tokens for request in past.requests] == [OUTPUT_LEN] * (NUM_REQUESTS + 1) + [1]
    early = past.requests[0]
    assert len(early.arrived.token_ids) // 4 > early.arrived.num_prompt_tokens, "with the output that it had by then"
    assert early.due_ns == 0
    assert past.late.num_gaps == past.outcome.num_gaps + OUTPUT_LEN - 1 - 3


def test_a_simulation_serves_the_same_requests_to_the_same_lengths(segment: Path) -> None:
    past = read_past(segment)
    column = simulate(past, past.limits, 1, seed=0, title="")
    assert column.outcome.num_gaps == past.outcome.num_gaps
    assert column.outcome.num_finished == NUM_REQUESTS + 2
    again = simulate(past, past.limits, 1, seed=0, title="")
    assert again.outcome.as_object() == column.outcome.as_object(), "one seed, one run"


def test_other_settings_make_another_run_beside_the_recorded_one(
    segment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(segment), "--tbt-target-ms", "7", "--policy", "prefill_first", "--workers", "3"]) == 0
    told = capsys.readouterr().out
    assert "recorded: target 500 ms, stall_free, 1 workers; what if: target 7 ms, prefill_first, 3 workers" in told
    (header,) = [line for line in told.splitlines() if "simulated, what if" in line]
    assert header.split("   ")[-2:] == ["simulated, as recorded", "simulated, what if"]
    (late,) = [line for line in told.splitlines() if line.startswith("gaps above target")]
    recorded, as_recorded, what_if = [int(cell.split(" of ")[0]) for cell in late.split("  ") if " of " in cell]
    assert recorded == as_recorded == 0
    assert what_if > 0, "iterations of this device take longer than 7 ms"


@pytest.mark.parametrize("flags", [["--tbt-target-ms", "0"], ["--workers", "0"]])
def test_settings_that_cannot_be_are_refused_with_the_value(
    segment: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(segment), *flags]) == 2
    assert f"{flags[0]} is 0" in capsys.readouterr().err


def test_a_gap_is_named_by_what_lay_in_it(segment: Path) -> None:
    past = read_past(segment)
    assert past.late.num_late == 0
    strict = LateGaps(1)
    assert strict.num_late == 0
    slow = simulate(past, past.limits, 1, seed=0, title="")
    assert set(slow.late.num_by_cause) <= {"prefill_interference", "over_capacity", "device_slow", "preemption", "lag"}
