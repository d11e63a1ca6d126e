"""Whether a run kept its promises, and how to see early that it will not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from loadtest.simulate.measures import Measures, Outcome
from loadtest.simulate.requests import Arrival

MAX_REJECTED_SHARE = 0.01
"""Requests that may be refused by a system whose capacity is said to suffice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """What must hold. The paper's: P99 TBT within the target, median scheduling delay within two seconds."""

    late_share: float = 0.01  # of gaps, what may exceed the target
    max_delay_ns: int = 2_000_000_000  # of the median scheduling delay

    def holds(self, outcome: Outcome, index: int = 0) -> bool:
        """Whether the run did, for the target of that index. One that was cut short did not."""
        delay_ns = outcome.scheduling_delay.quantile(0.5)
        return (
            not outcome.is_cut_short
            and delay_ns is not None
            and delay_ns <= self.max_delay_ns
            and outcome.num_rejected <= MAX_REJECTED_SHARE * outcome.num_arrived
            and outcome.num_late[index] <= self.late_share * outcome.num_gaps
        )

    def is_lost(self, arrivals: Iterable[Arrival], num_warmup: int = 0) -> Callable[[Measures, int], bool]:
        """Return a test for a run of these arrivals, of which the first num_warmup do not count: whether it can hold
        for no target any more, however it goes on.

        That takes a fraction of the time where the rate is far too high.
        """
        num_requests = num_gaps = 0
        for arrival in islice(arrivals, num_warmup, None):
            num_requests += 1
            num_gaps += arrival.output_len - 1
        most_late = self.late_share * num_gaps

        def is_lost(measures: Measures, now_ns: int) -> bool:
            outcome = measures.outcome
            if min(outcome.num_late) > most_late:
                return True
            num_delayed = outcome.scheduling_delay.num_above(self.max_delay_ns)
            num_delayed += sum(1 for since_ns in measures.waiting_since() if now_ns - since_ns > self.max_delay_ns)
            return num_delayed > num_requests / 2 + 1

        return is_lost
