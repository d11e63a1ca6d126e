"""Whether what the generator says of a server is true."""

import asyncio
import itertools
import time
from typing import Any

import pytest

from common.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from loadtest.drive import Outcome
from loadtest.records import CUT
from loadtest.stats import summarize
from loadtest.summary import report_of
from loadtest.workload import RequestClass, pairs_of
from tests.loadtest.fake_server import FakeServer, Script
from tests.loadtest.worlds import NUM_TRY_OUT_REQUESTS, measured, outcome_of

CLASSES = (RequestClass(name="default", lengths=pairs_of("1", "1")),)
TOLERANCE_MS = 1.0
NUM_ATTEMPTS = 20
"""A machine that is busy for a moment delays both sides; one quiet attempt shows what the generator is good to."""


def largest_error_ms(server: FakeServer, outcome: Outcome) -> float:
    """The largest difference between a percentile reported and the same of the server's own book."""
    book = server.seen[NUM_TRY_OUT_REQUESTS:]
    # The server's own sending times, not the delays that it meant to keep: a busy machine keeps no delay exactly.
    gaps_ms = [(b - a) / NS_PER_MS for seen in book for a, b in itertools.pairwise(seen.sent_ns)]
    waits_ms = [(seen.sent_ns[0] - seen.arrived_ns) / NS_PER_MS for seen in book]
    found = report_of(outcome, CLASSES, {})
    errors: list[float] = []
    for truth, claim in (
        (summarize(gaps_ms), found["tbt_ms"]),
        (summarize(waits_ms), found["detail"]["ttft_from_send_ms"]),
    ):
        errors += [abs((truth[name] or 0.0) - claim[name]) for name in ("p50", "p90", "p99")]
    return max(errors)


def test_percentiles_are_right_to_a_millisecond() -> None:
    gaps_s = (0.004, 0.012, 0.007, 0.03, 0.005, 0.009)
    errors = []
    for _ in range(NUM_ATTEMPTS):
        server = FakeServer(lambda body: Script(first_s=0.015, gaps_s=gaps_s))
        outcome = outcome_of(server, arrivals="constant", rate=40.0, requests=40, output_len="7")
        assert len(measured(outcome)) == 40
        errors.append(largest_error_ms(server, outcome))
        if errors[-1] <= TOLERANCE_MS:
            return
    pytest.fail(f"percentiles off by {errors} ms")


def test_no_token_is_stamped_before_it_was_sent() -> None:
    server = FakeServer(lambda body: Script(gaps_s=(0.002,)))
    outcome = outcome_of(server, arrivals="constant", rate=100.0, requests=20)

    assert len({seen.body["prompt"] for seen in server.seen}) == 20 + NUM_TRY_OUT_REQUESTS  # every prompt is its own
    stamped = sorted(tuple(record.chunk_ns) for record in measured(outcome))
    sent = sorted(tuple(seen.sent_ns) for seen in server.seen[NUM_TRY_OUT_REQUESTS:])
    for stamps, book in zip(stamped, sent, strict=True):
        assert all(stamp >= sent_ns for stamp, sent_ns in zip(stamps, book, strict=True))


def test_a_stalled_server_meets_every_request_that_an_ideal_generator_would_have_sent() -> None:
    """Coordinated omission: a generator that waits for replies would send one request into the stall, not all."""
    server = FakeServer(lambda body: Script())
    stall: dict[str, int] = {}

    async def stall_server() -> None:
        await server.has_seen(NUM_TRY_OUT_REQUESTS + 5)
        server.flowing.clear()
        stall["begin"] = monotonic_ns()
        await asyncio.sleep(0.4)
        stall["end"] = monotonic_ns()
        server.flowing.set()

    outcome = outcome_of(server, stall_server, arrivals="constant", rate=50.0, requests=100)

    caught = [r for r in measured(outcome) if stall["begin"] < r.scheduled_ns < stall["end"]]
    assert len(caught) >= 19  # 0.4 s at 50 per second, whatever the machine was doing
    for record in caught:
        assert (record.ttft_ns() or 0) >= stall["end"] - record.scheduled_ns
    # They were sent into the stall, not merely booked: those that a busy machine made late for its end are few.
    assert sum(record.sent_ns < stall["end"] for record in caught) > len(caught) // 2
    scheduled = [record.scheduled_ns for record in measured(outcome)]
    assert scheduled == [outcome.start_ns + index * NS_PER_S // 50 for index in range(100)]


def test_a_generator_that_was_late_says_so_and_hides_none_of_it() -> None:
    server = FakeServer(lambda body: Script())

    async def block_the_loop() -> None:
        await server.has_seen(NUM_TRY_OUT_REQUESTS + 5)
        time.sleep(0.3)  # noqa: ASYNC251 - the fault under test.

    outcome = outcome_of(server, block_the_loop, arrivals="constant", rate=50.0, requests=60)
    found = report_of(outcome, CLASSES, {})

    late = [record for record in measured(outcome) if record.send_lag_ns() > 100 * NS_PER_MS]
    assert len(late) >= 8
    for record in late:
        assert (record.ttft_ns() or 0) >= (record.ttft_from_send_ns() or 0) + record.send_lag_ns()
    assert not found["valid"]
    assert any("did not keep up" in reason for reason in found["detail"]["invalid_because"])


def test_arrivals_beyond_the_bound_in_flight_are_counted_and_make_the_run_invalid() -> None:
    server = FakeServer(lambda body: Script(first_s=1.0))
    outcome = outcome_of(server, arrivals="constant", rate=100.0, requests=20, max_in_flight=4)
    found = report_of(outcome, CLASSES, {})

    assert found["requests"] == 20
    assert found["detail"]["errors_by_kind"]["not_sent"] >= 10
    assert not found["valid"]


def test_load_around_the_window_is_not_measured_and_lasts_until_the_measured_requests_end() -> None:
    server = FakeServer(lambda body: Script(first_s=0.1, gaps_s=(0.05,)))
    outcome = outcome_of(server, arrivals="constant", rate=50.0, requests=10, startup_s=0.2, drain_s=5.0)

    inside = measured(outcome)
    assert len(inside) == 10
    assert all(outcome.window_start_ns <= r.scheduled_ns < outcome.window_end_ns for r in inside)
    before = [r for r in outcome.records if r.scheduled_ns < outcome.window_start_ns]
    after = [r for r in outcome.records if r.scheduled_ns >= outcome.window_end_ns]
    assert len(before) == 10  # 0.2 s at 50 per second
    last_end_ns = max(record.ended_ns for record in inside)
    assert len(after) >= 10  # each answer takes 0.3 s, and so long arrivals go on
    assert all(record.scheduled_ns <= last_end_ns + NS_PER_S for record in after)
    assert all(record.is_ok for record in inside)
    assert CUT in {record.error for record in after} <= {"", CUT}
    found = report_of(outcome, CLASSES, {})
    assert (found["requests"], found["errors"]) == (10, 0)
    assert found["detail"]["requests_around_window"] == len(before) + len(after)


def test_a_duration_measures_what_is_scheduled_in_it() -> None:
    outcome = outcome_of(FakeServer(), arrivals="constant", rate=50.0, duration=0.4)

    assert len(measured(outcome)) == 20
    assert outcome.window_end_ns - outcome.window_start_ns == 4 * NS_PER_S // 10


@pytest.mark.parametrize("seed", [0, 1])
def test_one_seed_makes_one_load(seed: int) -> None:
    def load() -> list[Any]:
        server = FakeServer()
        outcome_of(server, rate=400.0, requests=15, prompt_len="uniform:2:40", output_len="uniform:1:9", seed=seed)
        return sorted((seen.body["prompt"], seen.body["max_tokens"]) for seen in server.seen)

    assert load() == load()
