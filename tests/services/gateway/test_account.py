"""The sum of a gap is closed at the gateway: exact whatever the hops' clocks say, and named by its largest part."""

from hypothesis import given
from hypothesis import strategies as st

from common.account import Cause, GapAccount
from common.ids import InstanceId, RequestId, WorkerId
from common.messages import Submit, TextBatch
from common.messages.gaps import NO_GAP, WorkerGap
from common.messages.requests import Choice, Sampling, Stamps, TextDelta, TextPrompt
from services.gateway.account import Stall
from services.gateway.calls import NO_TARGET_NS, Call
from services.gateway.core import StreamCore

MS = 1_000_000
PEER = "a tokenizer's connection"
REQUEST = RequestId("a-0")
NUM_PARTS = 8
"""Of a WorkerGap, the first fields."""


class Line:
    """One stream, whose tokens pass the hops when the test says."""

    def __init__(self, target_ms: float = 100) -> None:
        submit = Submit(
            attempt=1,
            model="tiny",
            prompt=TextPrompt(text="Hi"),
            choices=(Choice(REQUEST, seed=0),),
            sampling=Sampling(),
            max_tokens=None,
        )
        self.core = StreamCore(retry_after_s=1)
        self.call = Call("a", (submit,), arrived_ns=0, max_unsent_bytes=10**6, tbt_target_ns=int(target_ms * MS))
        self.core.open(self.call, PEER)
        self.stream = self.call.streams[0]
        self.num_tokens = 0

    def token(
        self,
        *,
        worker: int = 0,
        scheduler: int = 0,
        tokenizer: int = 0,
        arrived: int = 0,
        gap: WorkerGap | None = None,
        text: str = "x",
    ) -> None:
        """A token arrives; times in nanoseconds, each hop's by its own clock."""
        stamps = Stamps(WorkerId(InstanceId("worker")), self.num_tokens, worker, scheduler, tokenizer)
        delta = TextDelta(
            REQUEST, 1, self.num_tokens, (7,), self.stream.text_len, text, stamps, NO_GAP if gap is None else 0
        )
        self.num_tokens += 1
        self.core.apply(PEER, TextBatch(deltas=(delta,), gaps=() if gap is None else (gap,)), now_ns=arrived)

    def leave(self, now_ns: int) -> Stall | None:
        """What has arrived is written to the connection."""
        self.call.take_fresh()
        self.stream.take_text()
        gap_ns = self.stream.mark(now_ns, self.call.blocked_ns(now_ns))
        return self.stream.stall if gap_ns is not None else None


def parts_ms(stall: Stall | None) -> dict[str, float]:
    assert stall is not None
    return {name: part_ns / MS for name, part_ns in stall.account.parts().items()}


def test_each_hop_has_what_it_added_to_the_gap() -> None:
    line = Line()
    # Four clocks that have nothing to do with each other.
    line.token(worker=0, scheduler=10**15, tokenizer=5, arrived=10**12)
    assert line.leave(10**12 + 1 * MS) is None, "a first token ends no gap"
    gap = WorkerGap(decode_ns=40 * MS, device_slow_ns=2 * MS)
    line.token(worker=42 * MS, scheduler=10**15 + 45 * MS, tokenizer=5 + 55 * MS, arrived=10**12 + 100 * MS, gap=gap)
    stall = line.leave(10**12 + 131 * MS)

    assert parts_ms(stall) == {
        "decode": 40,
        "device_slow": 2,
        "scheduler_lag": 3,
        "detokenizer_lag": 10,
        "gateway_lag": 75,
    }
    assert stall is not None
    assert (stall.gap_ns, stall.target_ns, stall.index, stall.cause) == (130 * MS, 100 * MS, 1, Cause.GATEWAY_LAG)


def test_time_for_which_the_connection_was_full_is_the_clients() -> None:
    line = Line()
    line.token(arrived=1)
    line.leave(1)
    line.call.block(10 * MS)
    line.token(arrived=20 * MS, tokenizer=20 * MS, scheduler=20 * MS, gap=WorkerGap(decode_ns=20 * MS))
    line.token(arrived=40 * MS, tokenizer=40 * MS, scheduler=40 * MS, gap=WorkerGap(decode_ns=20 * MS))
    line.call.unblock(220 * MS)
    stall = line.leave(221 * MS)
    assert parts_ms(stall)["slow_client"] == 200, "from the arrival of the first token that could not leave"
    assert stall is not None
    assert stall.cause is Cause.SLOW_CLIENT
    assert sum(stall.account.parts().values()) == stall.gap_ns

    # The last of the tokens that left together had waited for 180 ms itself: the next one is measured against it.
    line.token(arrived=60 * MS, tokenizer=60 * MS, scheduler=60 * MS, gap=WorkerGap(decode_ns=20 * MS))
    stall = line.leave(331 * MS)
    assert parts_ms(stall)["slow_client"] == -180


def test_a_hop_that_catches_up_has_a_negative_part() -> None:
    line = Line(target_ms=1)
    line.token(scheduler=0, tokenizer=50 * MS, arrived=50 * MS)
    line.leave(50 * MS)
    line.token(scheduler=20 * MS, tokenizer=52 * MS, arrived=52 * MS, gap=WorkerGap(decode_ns=20 * MS))
    assert parts_ms(line.leave(52 * MS)) == {"decode": 20, "detokenizer_lag": -18}


def test_a_token_whose_forerunner_no_hop_knows_counts_as_lost_on_the_way() -> None:
    line = Line()
    line.token(scheduler=10**15, arrived=MS)
    line.leave(MS)
    line.token(scheduler=3, arrived=901 * MS)
    stall = line.leave(901 * MS)
    assert stall is not None
    assert (stall.cause, parts_ms(stall)) == (Cause.WORKER_LOST, {"worker_lost": 900})


def test_a_gap_before_a_token_known_already_is_not_taken_for_that_before_the_next() -> None:
    line = Line()
    line.token(arrived=MS)
    line.leave(MS)
    stamps = Stamps(WorkerId(InstanceId("worker")), 1, 0, 0, 0)
    delta = TextDelta(REQUEST, 1, 0, (7, 8), 0, "xy", stamps, 0)
    line.core.apply(PEER, TextBatch(deltas=(delta,), gaps=(WorkerGap(decode_ns=5 * MS),)), now_ns=201 * MS)
    assert parts_ms(line.leave(201 * MS)) == {"worker_lost": 200}


def test_text_held_back_while_tokens_are_in_time_is_no_stall() -> None:
    line = Line()
    for index, text in enumerate(("a", "", "", "b", "c")):
        now_ns = index * 60 * MS + 1
        line.token(scheduler=now_ns, tokenizer=now_ns, arrived=now_ns, gap=WorkerGap(decode_ns=60 * MS), text=text)
        assert line.leave(now_ns) is None
        assert line.stream.held_text_ns == (180 * MS if text == "b" else 0)
    assert line.stream.num_stalls == 0


def test_a_late_token_is_the_stall_even_where_text_was_held_too() -> None:
    line = Line()
    for now_ns, text in ((1, "a"), (60 * MS, ""), (200 * MS, "b")):
        line.token(
            scheduler=now_ns, tokenizer=now_ns, arrived=now_ns, gap=WorkerGap(device_slow_ns=140 * MS), text=text
        )
        line.leave(now_ns)
    assert line.stream.num_stalls == 1
    assert line.stream.held_text_ns == 0


def test_a_call_that_is_answered_as_a_whole_never_stalls() -> None:
    line = Line()
    line.call.tbt_target_ns = NO_TARGET_NS
    line.token()
    line.leave(1)
    line.token(gap=WorkerGap(), arrived=10**12)
    assert line.leave(10**12) is None


def test_decode_work_is_a_cause_only_where_it_is_above_the_target_alone() -> None:
    account = GapAccount(
        worker=WorkerGap(decode_ns=90, prefill_interference_ns=20),
        scheduler_lag_ns=5,
        detokenizer_lag_ns=0,
        gateway_lag_ns=0,
        slow_client_ns=0,
    )
    assert account.cause(target_ns=100) is Cause.PREFILL_INTERFERENCE
    assert account.cause(target_ns=80) is Cause.OVER_CAPACITY


@given(
    hops=st.lists(
        st.tuples(*[st.integers(-(10**12), 10**12) for _ in range(3)], *[st.integers(0, 10**9) for _ in range(3)]),
        min_size=2,
        max_size=12,
    ),
    parts=st.lists(st.integers(-(10**9), 10**9), min_size=NUM_PARTS, max_size=NUM_PARTS),
    leaves=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_the_parts_sum_to_the_gap_to_the_nanosecond(
    hops: list[tuple[int, ...]], parts: list[int], leaves: list[bool]
) -> None:
    """Whatever the clocks, however tokens pile up, and however often the connection is full."""
    line = Line(target_ms=0)
    now_ns = 1
    for (worker, scheduler, tokenizer, until_arrival, until_block, until_free), leave in zip(
        hops, leaves, strict=False
    ):
        now_ns += until_arrival
        gap = WorkerGap(*parts)  # type: ignore[arg-type]  # The last field has its default.
        line.token(worker=worker, scheduler=scheduler, tokenizer=tokenizer, arrived=now_ns, gap=gap)
        line.call.block(now_ns + until_block)
        now_ns += until_block + until_free
        line.call.unblock(now_ns)
        if leave:
            last_ns = line.stream.last_token_ns
            stall = line.leave(now_ns)
            if last_ns and now_ns > last_ns:
                assert stall is not None
                assert stall.gap_ns == now_ns - last_ns == sum(stall.account.parts().values())
