"""Tokens that clients read, followed back to the iterations that made them."""

from array import array

import numpy as np
import pytest

from loadtest.drive import Outcome
from loadtest.experiments.control_plane import HOPS, follow
from loadtest.experiments.ring_witness import Sightings
from loadtest.records import RequestRecord

MS = 1_000_000
NUM_ITERATIONS = 12


def seen() -> Sightings:
    """Iterations 10 ms apart; each hop has the token a millisecond after the one before it."""
    ends_ns = [(index + 1) * 10 * MS for index in range(NUM_ITERATIONS)]
    return Sightings(
        worker_ns=array("q", ends_ns),
        scheduler_ns=array("q", [at_ns + MS for at_ns in ends_ns]),
        tokenizer_ns=array("q", [at_ns + 2 * MS for at_ns in ends_ns]),
    )


def outcome(pieces_ms: list[float], num_tokens: int, error: str = "") -> Outcome:
    record = RequestRecord(
        index=0, chunk_ns=array("q", [round(at * MS) for at in pieces_ms]), num_output_tokens=num_tokens, error=error
    )
    return Outcome(start_ns=0, window_end_ns=1000 * MS, records=[record])


def as_ms(values: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> list[float]:
    return [round(float(value) / MS, 3) for value in values]


def test_a_tokens_lag_is_the_sum_of_its_hops_and_what_a_gap_gains_the_difference_of_two() -> None:
    # The tokens of iterations 2 to 5; the third of them is read late.
    lags = follow(outcome([33, 43, 57, 63], 4), seen())
    assert as_ms(lags.lags["all"]) == [3, 3, 7, 3]
    assert as_ms(lags.lags["to client"]) == [1, 1, 5, 1]
    assert as_ms(lags.added["all"]) == [0, 4, -4]
    assert as_ms(lags.added["to text"]) == [0, 0, 0]
    by_hop = np.stack([lags.lags[hop] for hop in HOPS[:-1]])
    assert list(by_hop.sum(axis=0)) == list(lags.lags["all"])


def test_tokens_that_came_in_one_piece_were_read_together() -> None:
    lags = follow(outcome([33, 53, 63], 4), seen())
    assert as_ms(lags.lags["all"]) == [3, 13, 3, 3]


def test_two_pieces_are_never_laid_to_one_iteration() -> None:
    # The piece at 62.5 ms was late by more than an iteration: it cannot be of the same iteration as the one behind it.
    lags = follow(outcome([33, 43, 62.5, 62.9, 73], 5), seen())
    assert as_ms(lags.lags["all"]) == [3, 3, 12.5, 2.9, 3]


@pytest.mark.parametrize("num_tokens", [9, 20])
def test_a_stream_that_does_not_add_up_is_counted_and_left_out(num_tokens: int) -> None:
    lags = follow(outcome([33, 43, 53, 63], num_tokens), seen())
    assert (len(lags.lags["all"]), lags.num_unmatched) == (0, 1)


def test_a_stream_that_was_cut_says_nothing() -> None:
    lags = follow(outcome([33, 43, 53], 3, error="cut"), seen())
    assert (len(lags.lags["all"]), lags.num_unmatched) == (0, 0)


def test_only_tokens_of_the_measured_window_count() -> None:
    run = outcome([33, 43, 53, 63], 4)
    run.window_start_ns, run.window_end_ns = 40 * MS, 60 * MS
    lags = follow(run, seen())
    assert len(lags.lags["all"]) == 2
