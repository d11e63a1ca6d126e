"""Why neighbouring tokens of a stream lay as far apart as they did at the worker: divided by the scheduler, handed up
the ring with the tokens, summed up by the gateway (docs/stalls.md)."""

from common.ids import RequestId
from common.messages.base import Row


class Culprit(Row, frozen=True):
    """A request that took time from others within a gap: its prompt was computed beside them, or their blocks became
    its own."""

    request_id: RequestId
    num_tokens: int  # of its prompt, computed in the gap; 0 where it took blocks
    ns: int  # its share, as predicted; 0 where it took blocks
    traceparent: str = ""  # of its request


class WorkerGap(Row, frozen=True):
    """The time between two neighbouring tokens of a stream, from the worker's end of one iteration to its end of
    another: to the nanosecond the sum of the fields that end in _ns. A part may be negative: the device was faster than
    predicted.

    Where the worker is another one than for the token before, the whole is the time between the two results at the
    scheduler.
    """

    decode_ns: int = 0  # the decodes of the iteration that brought the token, alone, as predicted
    prefill_interference_ns: int = 0  # what prompts added to iterations of the gap, as predicted
    not_scheduled_ns: int = 0  # decodes of others, in iterations that the stream sat out, as predicted
    preemption_ns: int = 0  # from losing its blocks until it was computed again
    kv_wait_ns: int = 0  # iterations that it sat out for want of a block, as predicted
    plan_wait_ns: int = 0  # the worker had no plan
    worker_lost_ns: int = 0  # from the last token of a worker that was lost
    device_slow_ns: int = 0  # what iterations took beyond their prediction
    num_recomputed_tokens: int = 0  # after a preemption or the loss of a worker
    culprits: tuple[Culprit, ...] = ()  # only of gaps that may be a stall

    @property
    def total_ns(self) -> int:
        return (
            self.decode_ns
            + self.prefill_interference_ns
            + self.not_scheduled_ns
            + self.preemption_ns
            + self.kv_wait_ns
            + self.plan_wait_ns
            + self.worker_lost_ns
            + self.device_slow_ns
        )


NO_GAP = -1
"""In place of an index into a batch's gaps: no earlier token of the stream is known to the scheduler."""
