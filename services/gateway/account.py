"""The gateway's part of the account: where the sum of a gap is closed, and a gap becomes a stall. Pure.

A token leaves stamps at every hop, and only differences between the stamps of two tokens at one hop are used, so no two
clocks need agree. With g_h the gap at hop h, the client's gap is

    g_worker + (g_scheduler - g_worker) + (g_tokenizer - g_scheduler) + (g_client - g_tokenizer)

where the scheduler has divided the first term, and the last is the gateway's own: slow_client for as long as the
client's connection was full, gateway_lag for the rest.
"""

from collections import Counter
from dataclasses import dataclass

from common.account import Cause, GapAccount
from common.ids import RequestId
from common.messages.gaps import WorkerGap
from common.messages.requests import Stamps


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A gap at a client's connection that was longer than its stream's target."""

    request_id: RequestId
    index: int  # in the output, of the token that came late
    at_ns: int  # when it left, by the gateway's clock
    gap_ns: int
    target_ns: int
    stamps: Stamps  # of the token that came late
    account: GapAccount  # sums to gap_ns

    @property
    def cause(self) -> Cause:
        return self.account.cause(self.target_ns)


class StallCounts:
    """Stalls of all streams of this process, for metrics. held_text is counted here, and is no stall."""

    def __init__(self) -> None:
        self.num_by_cause: Counter[Cause] = Counter()
        self.late_ns_by_cause: Counter[Cause] = Counter()  # what gaps had above their targets

    def add(self, cause: Cause, late_ns: int) -> None:
        self.num_by_cause[cause] += 1
        self.late_ns_by_cause[cause] += late_ns


class StreamAccount:
    """Of one stream: the stamps of the last token that left, and of those that have come since. No allocation a token:
    it keeps what the messages hold."""

    __slots__ = (
        *("_earlier", "_earlier_slow_ns"),  # of the last token that left
        *("_first", "_first_blocked_ns", "_gap"),  # of the first one that has not
        *("_newest", "_newest_blocked_ns"),  # of the last one that has not
    )

    def __init__(self) -> None:
        self._earlier: Stamps | None = None
        self._first: Stamps | None = None
        self._newest: Stamps | None = None
        self._gap: WorkerGap | None = None
        self._earlier_slow_ns = self._first_blocked_ns = self._newest_blocked_ns = 0

    def came(self, stamps: Stamps, gap: WorkerGap | None, blocked_ns: int) -> None:
        """Tokens have arrived.

        Args:
            stamps: Theirs.
            gap: What lies between the first of them and the token before, at the worker; None where nobody knows.
            blocked_ns: For how long, all told, the client's connection had been full by then.
        """
        if self._first is None:
            self._first, self._gap, self._first_blocked_ns = stamps, gap, blocked_ns
        self._newest, self._newest_blocked_ns = stamps, blocked_ns

    def left(self, blocked_ns: int) -> None:
        """All that came has left; blocked_ns as above, by now."""
        self._earlier, self._earlier_slow_ns = self._newest, blocked_ns - self._newest_blocked_ns
        self._first = None

    def close(self, gap_ns: int, blocked_ns: int) -> tuple[GapAccount, Stamps]:
        """The sum of the gap before the first token that has come, which leaves now, and that token's stamps. Tokens
        that leave together have one gap before the first, and none between them."""
        assert self._earlier is not None, "a gap has a token before it"
        assert self._first is not None, "a gap ends with a token"
        slow_client_ns = blocked_ns - self._first_blocked_ns - self._earlier_slow_ns
        return close_account(gap_ns, self._gap, self._earlier, self._first, slow_client_ns), self._first


def close_account(
    gap_ns: int, worker: WorkerGap | None, earlier: Stamps, later: Stamps, slow_client_ns: int
) -> GapAccount:
    """Return the sum of a gap between two tokens.

    Args:
        gap_ns: At the client's connection.
        worker: As the scheduler divided it. None where it knows no earlier token of the stream: the request was placed
            anew from above, and no hop but this one has seen both tokens.
        earlier: Stamps of the token before.
        later: Stamps of the token.
        slow_client_ns: For how much longer the token waited for a full connection than the one before.
    """
    if worker is None:
        return GapAccount(
            worker=WorkerGap(worker_lost_ns=gap_ns - slow_client_ns),
            scheduler_lag_ns=0,
            detokenizer_lag_ns=0,
            gateway_lag_ns=0,
            slow_client_ns=slow_client_ns,
        )
    scheduler_ns = later.scheduler_ns - earlier.scheduler_ns
    tokenizer_ns = later.tokenizer_ns - earlier.tokenizer_ns
    account = GapAccount(
        worker=worker,
        scheduler_lag_ns=scheduler_ns - worker.total_ns,
        detokenizer_lag_ns=tokenizer_ns - scheduler_ns,
        gateway_lag_ns=gap_ns - tokenizer_ns - slow_client_ns,
        slow_client_ns=slow_client_ns,
    )
    assert account.total_ns == gap_ns, "the parts of a gap sum to it"
    return account
