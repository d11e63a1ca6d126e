"""Stop strings in a text that comes in pieces."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.text.stops import StopMatcher

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4).map(tuple)


def feed_all(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    """What comes out for each piece, the last for the end; and the stop string."""
    matcher = StopMatcher(stops)
    out = []
    for piece in pieces:
        out.append(matcher.feed(piece))
        if matcher.matched is not None:
            return out, matcher.matched
    return [*out, matcher.finish()], None


def naive_end(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The text before the first place at which a stop string is complete, looked for in every prefix of the text."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            stop = max(completed, key=len)
            return text[: end - len(stop)], stop
    return text, None


def naive_held_len(stops: tuple[str, ...], text: str) -> int:
    return max(
        (n for n in range(len(text) + 1) for stop in stops if n < len(stop) and stop.startswith(text[len(text) - n :])),
        default=0,
    )


@settings(deadline=None)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_the_text_and_the_stop_are_those_of_a_naive_search_however_the_text_is_cut(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]

    out, stop = feed_all(stops, pieces)

    assert ("".join(out), stop) == naive_end(stops, text)


@settings(deadline=None)
@given(text=LETTERS, stops=STOPS)
def test_exactly_what_may_still_become_a_stop_string_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    before, stop = naive_end(stops, text)
    if stop is not None:
        return
    out, _ = feed_all(stops, list(text))
    for end in range(len(text) + 1):
        assert "".join(out[:end]) == text[: end - naive_held_len(stops, text[:end])]
    assert before == text


@pytest.mark.parametrize(
    ("stops", "pieces", "out", "stop"),
    [
        (("\n\nUser:",), ["Hi", ".\n", "\nUs", "er: x"], ["Hi", ".", "", ""], "\n\nUser:"),
        (("\n\nUser:",), ["Hi\n", "\nUs", "age"], ["Hi", "", "\n\nUsage", ""], None),
        (("aab",), ["aa", "ab"], ["", "a"], "aab"),
        (("stop", "top"), ["st", "op"], ["", ""], "stop"),
        (("abcd", "c"), ["ab", "c"], ["", "ab"], "c"),
        ((), ["anything"], ["anything", ""], None),
        (("🛑é",), ["a🛑", "e", "🛑é"], ["a", "🛑e", ""], "🛑é"),
    ],
)
def test_examples(stops: tuple[str, ...], pieces: list[str], out: list[str], stop: str | None) -> None:
    assert feed_all(stops, pieces) == (out, stop)
