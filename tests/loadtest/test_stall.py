"""The stall test: which gaps are whose fault."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import pytest

from common.clock import NS_PER_MS
from loadtest.cli import main
from loadtest.drive import Outcome
from loadtest.records import RequestRecord
from loadtest.stall_phases import INJECTED, STEADY, StallOutcome, gaps_by_phase, prefill_spans, stall_report
from tests.loadtest.fake_server import FakeServer, Script
from tests.loadtest.worlds import read, server_beside


def ms(*values: float) -> "array[int]":
    return array("q", [round(value * NS_PER_MS) for value in values])


def stream(class_name: str, *chunks_ms: float, sent_ms: float = 0.0) -> RequestRecord:
    chunks = ms(*chunks_ms)
    return RequestRecord(index=0, class_name=class_name, chunk_ns=chunks, sent_ns=ms(sent_ms)[0], ended_ns=chunks[-1])


def world(*records: RequestRecord, first_injection_ms: float = 100.0, last_end_ms: float = 300.0) -> StallOutcome:
    run = Outcome(start_ns=0, window_start_ns=0, window_end_ns=ms(1000)[0], records=list(records))
    return StallOutcome(
        run=run,
        first_injection_ns=ms(first_injection_ms)[0],
        last_end_ns=ms(last_end_ms)[0],
        num_streams=1,
        inject_prompt_len=4000,
        tbt_target_ms=50.0,
    )


def test_a_gap_belongs_to_the_prefill_that_it_overlaps() -> None:
    outcome = world(
        stream(STEADY, 0, 40, 90, 110, 190, 210, 290, 320, 350),
        stream(INJECTED, 180, sent_ms=100),
        stream(INJECTED, 280, 300, sent_ms=250),
    )
    gaps = {name: phase.flat() for name, phase in gaps_by_phase(outcome).items()}

    # 90-110 and 110-190 overlap the first prefill, 210-290 the second; 290-320 spans the last injection's end.
    assert gaps == {"before": [40, 50], "during": [20, 80, 80], "between": [20, 30], "after": [30]}


def test_prefills_that_overlap_count_as_one_span() -> None:
    outcome = world(
        stream(INJECTED, 180, sent_ms=100), stream(INJECTED, 150, sent_ms=120), stream(INJECTED, 240, sent_ms=200)
    )

    assert prefill_spans(outcome.run.records) == [tuple(ms(100, 180)), tuple(ms(200, 240))]


def test_a_gap_that_swallows_a_whole_prefill_is_during() -> None:
    outcome = world(stream(STEADY, 90, 400), stream(INJECTED, 180, sent_ms=100))

    assert gaps_by_phase(outcome)["during"].flat() == [310]


def test_gaps_outside_the_measured_time_are_left_out() -> None:
    outcome = world(stream(STEADY, -20, 10, 30, 990, 1010), stream(INJECTED, 180, sent_ms=100))
    gaps = gaps_by_phase(outcome)

    assert [gap for phase in gaps.values() for gap in phase.flat()] == [20, 960]


def test_a_test_without_gaps_before_or_during_proves_nothing() -> None:
    found = stall_report(world(stream(STEADY, 400, 420)))

    assert not found["valid"]
    assert len(found["detail"]["invalid_because"]) == 2


@pytest.mark.parametrize("is_stalling", [True, False])
def test_a_server_whose_streams_stop_for_a_prefill_is_seen_to_do_so(tmp_path: Path, is_stalling: bool) -> None:
    """As long as an injected prompt is read, a stalling server gives the others nothing."""
    file = tmp_path / "stall.json"

    def script_of(body: dict[str, Any]) -> Script:
        if len(body["prompt"].split()) < 100:
            return Script(gaps_s=(0.01,))
        if is_stalling:
            server.flowing.clear()
            asyncio.get_running_loop().call_later(1.0, server.flowing.set)
        return Script(first_s=1.0)

    server: FakeServer
    with server_beside(script_of) as server:
        status = main(
            [
                *("stall", "--base-url", server.url, "--streams", "3", "--prompt-len", "20", "--output-len", "600"),
                *("--inject-prompt-len", "400", "--every-s", "1.5", "--injections", "2", "--tbt-target-ms", "600"),
                *("--startup-s", "0.1", "--before-s", "0.4", "--after-s", "0.3", "--json", str(file)),
                *("--html", str(tmp_path / "stall.html")),
            ]
        )
    found = read(file)

    assert (found["streams"], found["injections"], found["errors"]) == (3, 2, 0)
    assert status == (0 if found["valid"] else 1)
    assert all(found["gaps"][phase] > 0 for phase in ("before", "during", "after"))
    if is_stalling:
        assert found["stalls"]["during"] == 6  # each of three streams, twice
    assert (tmp_path / "stall.html").read_text().count("<svg") == 2


def test_streams_that_keep_failing_end_the_test(tmp_path: Path) -> None:
    seen = iter(range(1000))
    file = tmp_path / "stall.json"
    with server_beside(lambda body: Script(status=200 if next(seen) == 0 else 503)) as server:
        status = main(
            [
                *("stall", "--base-url", server.url, "--streams", "1", "--injections", "1", "--json", str(file)),
                *("--startup-s", "30", "--before-s", "30", "--after-s", "30"),
            ]
        )

    assert status == 1
    assert "a steady stream failed again and again" in read(file)["detail"]["invalid_because"]
