"""How long prompts and outputs are."""

import random
import statistics
from pathlib import Path

import pytest

from loadtest.lengths import parse_lengths
from loadtest.traces import BUILT_IN, TraceError, load_trace


def draw(text: str, count: int = 20_000) -> list[int]:
    sample, rng = parse_lengths(text), random.Random(3)
    return [sample(rng) for _ in range(count)]


def test_a_number_is_that_length_always() -> None:
    assert set(draw("128", 10)) == {128}


def test_a_uniform_length_reaches_both_ends() -> None:
    drawn = draw("uniform:3:5", 200)

    assert set(drawn) == {3, 4, 5}


def test_a_lognormal_length_has_the_median_and_p90_asked_for() -> None:
    deciles = statistics.quantiles(draw("lognormal:400:1500"), n=10)

    assert deciles[4] == pytest.approx(400, rel=0.05)
    assert deciles[8] == pytest.approx(1500, rel=0.05)


def test_a_third_number_cuts_the_tail() -> None:
    assert max(draw("lognormal:400:1500:2000")) == 2000


def test_an_exponential_length_has_the_mean_asked_for() -> None:
    assert statistics.mean(draw("exp:300")) == pytest.approx(300, rel=0.05)


def test_a_choice_takes_each_as_often() -> None:
    drawn = draw("choice:64,1500")

    assert drawn.count(64) / len(drawn) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "uniform:5:3", "uniform:5", "lognormal:9:3", "choice:", "x:1"])
def test_what_is_no_length_is_refused_with_what_would_be(text: str) -> None:
    with pytest.raises(ValueError, match="lognormal:MEDIAN:P90") as refused:
        parse_lengths(text)

    assert repr(text) in str(refused.value)


def test_a_trace_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("arrived_at_s,num_prefill_tokens,num_decode_tokens\n0.0,10,3\n1.25,20,0\n2.5,30,4\n")

    trace = load_trace(str(file))

    # The row with an empty output is no request that can be sent.
    assert [(row.prompt_len, row.output_len) for row in trace.rows] == [(10, 3), (30, 4)]
    assert trace.arrivals_ns() == [0, 2_500_000_000]
    assert trace.source == "trace one.csv"


def test_arrivals_in_milliseconds_are_read_as_such(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("arrived_at_ms,num_prefill_tokens,num_decode_tokens\n0,10,3\n1500,20,2\n")

    assert load_trace(str(file)).arrivals_ns() == [0, 1_500_000_000]


def test_rows_that_do_not_fit_are_left_out_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n10,3\n9000,20\n")

    trace = load_trace(str(file)).no_longer_than(100)

    assert len(trace.rows) == 1
    assert "1 of 2 rows" in trace.source


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "num_prefill_tokens,num_decode_tokens\n1,x\n", ""])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)

    with pytest.raises(TraceError, match=r"bad\.csv"):
        load_trace(str(file))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_trace_whose_file_is_absent_is_made_with_the_same_median_and_p90(name: str) -> None:
    trace, shape = load_trace(f"nowhere/{name}.csv"), BUILT_IN[name]

    for lengths, (median, p90) in (
        ([row.prompt_len for row in trace.rows], shape.prompt),
        ([row.output_len for row in trace.rows], shape.output),
    ):
        deciles = statistics.quantiles(lengths, n=10)
        assert deciles[4] == pytest.approx(median, rel=0.1)
        assert deciles[8] == pytest.approx(p90, rel=0.1)
    assert trace.has_arrivals == (shape.rate_rps is not None)
    assert "built-in" in trace.source  # The report must not pass it for the real one.


def test_an_unknown_trace_is_refused_with_the_known_names() -> None:
    with pytest.raises(TraceError, match="azure_2023_conv"):
        load_trace("nothing.csv")


def test_arrivals_of_a_trace_without_any_are_refused() -> None:
    with pytest.raises(TraceError, match="no arrival times"):
        load_trace("sharegpt_8k").arrivals_ns()
