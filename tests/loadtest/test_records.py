"""Token gaps and chunk gaps, which must never be confused."""

import itertools
from array import array

from hypothesis import given
from hypothesis import strategies as st

from loadtest.records import CUT, RequestRecord


def record(
    chunks: list[int], *, silent: tuple[int, ...] = (), tokens: int | None = None, ids: int = 0, end: str = ""
) -> RequestRecord:
    made = RequestRecord(
        index=0,
        chunk_ns=array("q", chunks),
        silent_ns=array("q", silent),
        num_output_tokens=tokens,
        num_ids=ids,
        finish_reason=end,
    )
    made.settle()
    return made


def test_with_one_token_per_chunk_both_kinds_of_gap_are_the_same() -> None:
    stream = record([10, 15, 35], tokens=3)

    assert stream.chunk_gaps_ns() == stream.token_gaps_ns() == [5, 20]


def test_tokens_that_share_a_chunk_have_no_gap_between_them() -> None:
    stream = record([10, 15, 35], tokens=7)

    assert stream.chunk_gaps_ns() == [5, 20]
    assert sorted(stream.token_gaps_ns() or ()) == [0, 0, 0, 0, 5, 20]
    assert stream.tpot_ns() == 25 / 6


def test_token_gaps_of_a_stream_that_tells_no_number_are_not_known() -> None:
    stream = record([10, 15, 35])

    assert stream.token_gaps_ns() is None
    assert stream.tpot_ns() is None
    assert stream.max_gap_ns() == 20


def test_a_server_that_splits_tokens_over_chunks_tells_nothing_of_tokens() -> None:
    assert record([10, 15, 35], tokens=2).token_gaps_ns() is None


def test_ids_count_before_usage() -> None:
    assert record([10, 20], ids=4, tokens=9).num_tokens == 4


def test_events_without_text_are_tokens_when_usage_counts_them() -> None:
    """Half a character has no text, but its token has arrived."""
    stream = record([10, 30], silent=(20,), tokens=3)

    assert stream.chunk_gaps_ns() == [10, 10]


def test_events_without_text_are_nothing_when_usage_does_not_count_them() -> None:
    assert record([10, 30], silent=(20,), tokens=2).chunk_gaps_ns() == [20]


def test_the_closing_event_is_a_token_only_if_usage_says_so() -> None:
    apart = record([10, 20], silent=(30,), tokens=2, end="length")
    end_of_sequence = record([10, 20], silent=(30,), tokens=3, end="stop")
    both = record([10, 20], silent=(15, 30), tokens=3, end="length")

    assert apart.chunk_gaps_ns() == [10]
    assert end_of_sequence.chunk_gaps_ns() == [10, 10]
    assert both.chunk_gaps_ns() == [5, 5]


def test_the_first_token_is_no_gap() -> None:
    stream = record([10], tokens=1)

    assert stream.token_gaps_ns() == []
    assert stream.max_gap_ns() is None


def test_a_request_that_the_generator_cut_has_not_failed() -> None:
    cut, failed = record([]), record([])
    cut.error, failed.error = CUT, "timeout"

    assert (cut.is_ok, cut.is_failed) == (False, False)
    assert (failed.is_ok, failed.is_failed) == (False, True)


@given(
    chunks=st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 5)), min_size=1, max_size=30),
    target=st.integers(0, 1000),
)
def test_token_gaps_differ_from_chunk_gaps_by_zeros_alone(chunks: list[tuple[int, int]], target: int) -> None:
    times, tokens, at = [], [], 0
    for gap, count in chunks:
        at += gap
        times.append(at)
        tokens += [at] * count
    stream = record(times, tokens=len(tokens))

    truth = [b - a for a, b in itertools.pairwise(tokens)]
    assert sorted(stream.token_gaps_ns() or ()) == sorted(truth)
    assert sum(gap > target for gap in stream.chunk_gaps_ns()) == sum(gap > target for gap in truth)
