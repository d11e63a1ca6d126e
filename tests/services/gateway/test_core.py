"""The core acts on the next token index that it expects, and on nothing else."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.ids import RequestId
from common.messages import Submit, TextBatch
from common.messages.requests import (
    Choice,
    FinishReason,
    PromptDelta,
    RejectReason,
    RequestEnded,
    RequestQueued,
    RequestRejected,
    Sampling,
    TextPrompt,
)
from services.gateway.calls import Call, Phase
from services.gateway.core import CallChanged, CancelRequests, CutClient, DropPeer, Effect, StreamCore
from services.gateway.errors import internal_error
from tests.services.gateway.world import delta

PEER, OTHER = "a tokenizer's connection", "another's"
A0, A1, B0, B1 = (RequestId(name) for name in ("a-0", "a-1", "b-0", "b-1"))


def call_of(call_id: str = "a", *, n: int = 2, num_prompts: int = 1, max_unsent_bytes: int | None = 1000) -> Call:
    submits = tuple(
        Submit(
            attempt=1,
            model="tiny",
            prompt=TextPrompt(text="Hi"),
            choices=tuple(Choice(RequestId(f"{call_id}-{prompt * n + k}"), seed=k) for k in range(n)),
            sampling=Sampling(),
            max_tokens=None,
        )
        for prompt in range(num_prompts)
    )
    return Call(call_id, submits, arrived_ns=0, max_unsent_bytes=max_unsent_bytes)


class Bench:
    """A core with one open call."""

    def __init__(self, **fields: Any) -> None:
        self.core = StreamCore(retry_after_s=1)
        self.call = call_of(**fields)
        self.core.open(self.call, PEER)

    def apply(self, *, peer: str = PEER, **rows: Any) -> list[Effect]:
        return self.core.apply(peer, TextBatch(**{kind: tuple(of_kind) for kind, of_kind in rows.items()}), now_ns=5)

    def text(self, index: int = 0) -> str:
        return self.call.streams[index].take_text()


def queued(request_id: RequestId, attempt: int = 1) -> RequestQueued:
    return RequestQueued(request_id=request_id, attempt=attempt, num_prompt_tokens=7)


def ended(request_id: RequestId, num_output_tokens: int, **fields: Any) -> RequestEnded:
    fields = {"reason": FinishReason.STOP, "num_prompt_tokens": 7, "attempt": 1, **fields}
    return RequestEnded(request_id=request_id, num_output_tokens=num_output_tokens, **fields)


def rejected(request_id: RequestId) -> RequestRejected:
    return RequestRejected(request_id=request_id, attempt=1, reason=RejectReason.QUEUE_FULL, detail="9 wait; 9 may")


def test_a_call_is_queued_when_all_its_requests_are() -> None:
    bench = Bench()
    assert bench.apply(queued=[queued(A0)]) == [CallChanged(bench.call)]
    assert not bench.call.is_queued
    bench.apply(queued=[queued(A0)])
    assert not bench.call.is_queued, "a second word of the same request is not one of the other's"
    bench.apply(queued=[queued(A1)])
    assert bench.call.is_queued


def test_tokens_in_order_are_taken_and_the_end_carries_the_usage() -> None:
    bench = Bench(n=1)
    bench.apply(queued=[queued(A0)], deltas=[delta(A0, 0, 0, "He"), delta(A0, 1, 2, ""), delta(A0, 2, 2, "y", 2)])
    assert (bench.text(), list(bench.call.streams[0].token_ids)) == ("Hey", [1, 2, 3, 4])
    bench.apply(ended=[ended(A0, 4, num_cached_tokens=3)])
    assert bench.call.is_over
    counts = bench.call.counts()
    assert (counts.num_prompt_tokens, counts.num_output_tokens, counts.num_cached_tokens) == (7, 4, 3)
    assert bench.core.num_open == 0


def test_usage_counts_each_prompt_once_and_each_choice() -> None:
    bench = Bench(n=2, num_prompts=2)
    ids = [RequestId(f"a-{index}") for index in range(4)]
    bench.apply(deltas=[delta(each, 0, 0, "x") for each in ids], ended=[ended(each, 1) for each in ids])
    counts = bench.call.counts()
    assert (counts.num_prompt_tokens, counts.num_output_tokens) == (14, 4)


def test_what_came_before_is_skipped_and_an_overlap_gives_only_what_is_new() -> None:
    bench = Bench(n=1)
    bench.apply(deltas=[delta(A0, 0, 0, "abc", 3)])
    assert bench.apply(deltas=[delta(A0, 0, 0, "abc", 3)]) == []
    bench.apply(deltas=[delta(A0, 1, 1, "bcde", 4)])
    assert (bench.text(), list(bench.call.streams[0].token_ids)) == ("abcde", [1, 2, 3, 4, 5])


def test_held_text_may_come_without_a_token() -> None:
    bench = Bench(n=1)
    bench.apply(deltas=[delta(A0, 0, 0, "", 2), delta(A0, 2, 0, "late", 0)])
    assert bench.text() == "late"


def test_a_gap_in_tokens_text_or_end_drops_the_link_and_nothing_after_it_is_taken() -> None:
    for rows in (
        {"deltas": [delta(A0, 2, 1, "c")]},
        {"deltas": [delta(A0, 1, 2, "c")]},
        {"ended": [ended(A0, 2)]},
        {"deltas": [delta(A0, 1, 1, "b", attempt=2)]},
    ):
        bench = Bench()
        bench.apply(deltas=[delta(A0, 0, 0, "a")])
        effects = bench.apply(**rows)
        assert [type(effect) for effect in effects] == [DropPeer], rows
        assert (bench.text(), bench.call.is_over) == ("a", False)

    bench = Bench()
    effects = bench.apply(deltas=[delta(A0, 1, 0, "lost"), delta(A1, 0, 0, "after")])
    assert isinstance(effects[-1], DropPeer)
    assert bench.text(1) == ""


def test_rows_of_older_attempts_other_peers_and_strangers_are_dropped() -> None:
    bench = Bench(n=1)
    bench.call.streams[0].attempt = 2
    stranger = RequestId("who-0")
    rows = [delta(A0, 0, 0, "old"), delta(stranger, 5, 5, "x")]
    assert bench.apply(queued=[queued(A0)], deltas=rows, ended=[ended(A0, 9), ended(stranger, 9)]) == []
    assert bench.apply(peer=OTHER, deltas=[delta(A0, 9, 9, "elsewhere", attempt=2)]) == []
    assert (bench.text(), bench.call.streams[0].phase) == ("", Phase.SUBMITTED)


def test_one_rejection_fails_the_call_and_cancels_the_rest() -> None:
    bench = Bench()
    effects = bench.apply(queued=[queued(A0)], ended=[rejected(A1)])
    assert CancelRequests(PEER, (A0,)) in effects
    assert bench.call.failure is not None
    assert (bench.call.failure.status, bench.call.failure.message) == (429, "9 wait; 9 may")
    assert bench.core.num_open == 0


def test_an_error_below_fails_the_call_with_its_detail() -> None:
    for reason in (FinishReason.ERROR, FinishReason.CANCELLED):
        bench = Bench(n=1)
        bench.apply(ended=[ended(A0, 0, reason=reason, detail="the device broke")])
        assert bench.call.failure is not None
        assert (bench.call.failure.status, bench.call.failure.message) == (500, "the device broke")


def test_a_lost_peer_fails_its_calls_and_no_other() -> None:
    bench = Bench()
    other = call_of("b")
    bench.core.open(other, OTHER)
    effects = bench.core.lose(PEER, "gone")
    assert effects == [CallChanged(bench.call)], "there is nobody to send a Cancel to"
    assert bench.call.failure is not None
    assert bench.call.failure.status == 503
    assert not other.is_over
    assert (bench.core.num_open_at(PEER), bench.core.num_open_at(OTHER)) == (0, 2)


def test_a_closed_call_cancels_what_still_runs_of_it_at_once_and_only_once() -> None:
    bench = Bench()
    bench.apply(ended=[ended(A1, 0)])
    assert bench.core.close(bench.call) == [CancelRequests(PEER, (A0,))]
    assert bench.core.close(bench.call) == []
    assert bench.apply(deltas=[delta(A0, 0, 0, "late")]) == []


def test_a_client_that_does_not_read_is_cut_off_at_the_bound_counted_in_bytes() -> None:
    bench = Bench(max_unsent_bytes=8)
    assert bench.apply(deltas=[delta(A0, 0, 0, "éé"), delta(A1, 0, 0, "éé")])[-1:] != [CutClient(bench.call)]
    effects = bench.apply(deltas=[delta(A0, 1, 2, "!")])
    assert effects == [CancelRequests(PEER, (A0, A1)), CallChanged(bench.call), CutClient(bench.call)]

    patient = Bench(max_unsent_bytes=8)
    for index in range(4):
        patient.apply(deltas=[delta(A0, index, 8 * index, "12345678")])
        patient.call.take_fresh()
    assert not patient.call.is_over


def test_an_echoed_prompt_does_not_count_as_unread() -> None:
    bench = Bench(n=1, max_unsent_bytes=8)
    prompt = PromptDelta(A0, 1, "a long prompt", 0)
    assert not any(isinstance(effect, CutClient) for effect in bench.apply(prompts=[prompt]))


def test_ttft_is_no_gap_and_the_longest_gap_is_kept() -> None:
    bench = Bench(n=1)
    stream = bench.call.streams[0]
    gaps = []
    for index, now_ns in enumerate((100, 130, 135)):
        bench.apply(deltas=[delta(A0, index, index, "x")])
        gaps.append(stream.mark(now_ns))
    assert (gaps, stream.first_token_ns, stream.tbt_max_ns) == ([None, 30, 5], 100, 30)
    assert stream.mark(500) is None, "no token, no gap"


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]]]:
    """A text of one-character tokens, and ranges of it in any order: repeats, overlaps, gaps."""
    text = draw(st.text(min_size=1, max_size=12))
    bounds = st.integers(0, len(text))
    return text, [(min(pair), max(pair)) for pair in draw(st.lists(st.tuples(bounds, bounds), max_size=12))]


@given(deliveries())
def test_whatever_arrives_the_client_has_a_prefix_with_no_token_twice_and_none_missing(
    case: tuple[str, list[tuple[int, int]]],
) -> None:
    text, ranges = case
    bench = Bench(n=1, max_unsent_bytes=None)
    seen = ""
    for start, end in ranges:
        is_gap = start > len(seen)
        effects = bench.apply(deltas=[delta(A0, start, start, text[start:end], end - start)])
        assert any(isinstance(effect, DropPeer) for effect in effects) == is_gap
        seen += bench.text()
        assert text.startswith(seen)
        assert list(bench.call.streams[0].token_ids) == list(range(1, len(seen) + 1))
        if is_gap:
            break
        assert len(seen) >= end, "what is complete is taken at once"


@given(st.data())
def test_after_any_events_each_request_has_one_terminal_and_the_counts_are_right(data: st.DataObject) -> None:
    core = StreamCore(retry_after_s=1)
    calls = {"a": call_of("a"), "b": call_of("b")}
    core.open(calls["a"], PEER)
    core.open(calls["b"], OTHER)
    cancelled: list[RequestId] = []
    actions = st.sampled_from(["queue", "say", "end", "reject", "lose", "close", "fail"])
    for _ in range(data.draw(st.integers(0, 15))):
        request_id = data.draw(st.sampled_from([A0, A1, B0, B1]))
        call, peer = (calls["a"], PEER) if request_id in (A0, A1) else (calls["b"], OTHER)
        stream = call.streams[int(request_id[-1])]
        at = len(stream.token_ids)
        was_over = call.is_over
        match data.draw(actions):
            case "queue":
                effects = core.apply(peer, TextBatch(queued=(queued(request_id),)), 1)
            case "say":
                effects = core.apply(peer, TextBatch(deltas=(delta(request_id, at, stream.text_len, "x"),)), 1)
            case "end":
                effects = core.apply(peer, TextBatch(ended=(ended(request_id, at),)), 1)
            case "reject":
                effects = core.apply(peer, TextBatch(ended=(rejected(request_id),)), 1)
            case "lose":
                effects = core.lose(peer, "gone")
            case "close":
                effects = core.close(call)
            case _:
                effects = core.fail(call, internal_error("a test's"))
        cancelled += [each for effect in effects if isinstance(effect, CancelRequests) for each in effect.request_ids]
        assert not (was_over and any(isinstance(effect, CallChanged) and effect.call is call for effect in effects))
    assert len(cancelled) == len(set(cancelled)), "nothing is cancelled twice"
    open_at_end = {each.request_id for call in calls.values() for each in call.streams if each.request_id in core}
    assert not open_at_end & set(cancelled)
    assert core.num_open == core.num_open_at(PEER) + core.num_open_at(OTHER) == len(open_at_end)
