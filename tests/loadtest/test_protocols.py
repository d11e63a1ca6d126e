"""HTTP responses and server-sent events, however the network cuts them up."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.http1 import BadResponse, ResponseParser
from loadtest.sse import BadEvent, EventSplitter, parse_event

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
    b"5\r\nhello\r\n1;ext=1\r\n,\r\n6\r\n world\r\n0\r\nTrailer: x\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\nConnection: close\r\n\r\ngone"
EVENTS = b": a comment\n\ndata: one\n\nevent: x\r\ndata: two\r\n\r\ndata:three\ndata: more\n\nid: 7\n\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % len(data) for cut in cuts} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]


def fed(parser: ResponseParser, parts: list[bytes]) -> bytes:
    return b"".join(parser.feed(part) for part in parts)


@given(cuts=st.lists(st.integers(0, 500)))
def test_a_chunked_body_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    parser = ResponseParser()

    assert fed(parser, pieces(CHUNKED, cuts)) == b"hello, world"
    assert (parser.status, parser.is_complete, parser.keeps_alive) == (200, True, True)


@given(cuts=st.lists(st.integers(0, 500)))
def test_a_body_of_known_length_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    parser = ResponseParser()

    assert fed(parser, pieces(SIZED, cuts)) == b"gone"
    assert (parser.status, parser.is_complete, parser.keeps_alive) == (404, True, False)


def test_a_body_without_length_ends_with_the_connection() -> None:
    parser = ResponseParser()

    assert parser.feed(b"HTTP/1.1 200 OK\r\n\r\nsome") == b"some"
    was_complete = parser.is_complete
    parser.close()

    assert (was_complete, parser.is_complete, parser.keeps_alive) == (False, True, False)


def test_a_chunked_body_does_not_end_with_the_connection() -> None:
    parser = ResponseParser()
    parser.feed(CHUNKED[:-20])
    parser.close()

    assert not parser.is_complete


def test_an_interim_response_is_passed_over() -> None:
    parser = ResponseParser()

    assert parser.feed(b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED) == b"gone"
    assert parser.status == 404


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-server\r\n\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        SIZED + b"more",
        CHUNKED + b"more\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)
def test_what_is_no_response_is_refused(data: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseParser().feed(data)


@given(cuts=st.lists(st.integers(0, 500)))
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    splitter = EventSplitter()
    events = [event for part in pieces(EVENTS, cuts) for event in splitter.feed(part)]

    assert events == [b"one", b"two", b"three\nmore"]


def test_completions_and_chats_tell_their_text_alike() -> None:
    assert parse_event(b'{"choices":[{"text":"a","index":0}]}').text == "a"
    assert parse_event(b'{"choices":[{"delta":{"content":"a"}}]}').text == "a"
    assert parse_event(b'{"choices":[{"delta":{"reasoning_content":"a"}}]}').text == "a"


def test_the_event_that_opens_a_chat_holds_no_token() -> None:
    assert not parse_event(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}').may_hold_token
    assert parse_event(b'{"choices":[{"delta":{"content":""}}]}').may_hold_token


def test_usage_comes_alone_or_with_a_choice() -> None:
    alone = parse_event(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}')
    beside = parse_event(b'{"choices":[{"text":"a"}],"usage":null}')

    assert (alone.prompt_tokens, alone.completion_tokens, alone.may_hold_token) == (3, 7, False)
    assert beside.completion_tokens is None


@pytest.mark.parametrize("data", [b"", b"text", b"[1]", b'{"choices":"secret words"}'])
def test_what_is_no_completion_is_refused_without_repeating_it(data: bytes) -> None:
    with pytest.raises(BadEvent) as refused:
        parse_event(data)

    assert "secret" not in str(refused.value)
