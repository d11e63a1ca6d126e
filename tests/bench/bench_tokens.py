"""What a token costs each hop above the worker, in CPU time: `python -m tests.bench.bench_tokens`.

For a steady batch of streams, each hop with its messages; HTTP and sockets are not in it. Not a test: it asserts
nothing.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from common.ids import InstanceId, RequestId, WorkerId
from common.messages import StreamBatch, Submit, TextBatch
from common.messages.gaps import WorkerGap
from common.messages.requests import Choice, Sampling, Stamps, TextPrompt
from common.messages.streams import TokensSampled
from common.process import tune_garbage_collector
from common.wire.codec import decode, encode
from services.gateway.calls import Call
from services.gateway.core import StreamCore
from services.tokenizer.events import GatewayLink, ToGateway
from services.tokenizer.jobs import JobId
from services.tokenizer.open_requests import OpenRequests, Request
from services.tokenizer.relay import relay
from services.tokenizer.shell import stamped
from services.tokenizer.text.detokenizer import ByteDetokenizer
from services.tokenizer.text.stream import TextStream
from tests.bench.bench_step import measure as measure_step

PEER = "a tokenizer's connection"
MS = 1_000_000
T = TypeVar("T")


def name_of(n: int) -> RequestId:
    return RequestId(f"cmpl-0123456789abcdef01234567-{n}")


def stream_batch(num_streams: int, index: int) -> StreamBatch:
    """What the scheduler sends for one iteration of a steady batch."""
    rows = tuple(TokensSampled(name_of(n), 1, index, (1234,), 0, 0) for n in range(num_streams))
    stamps = Stamps(WorkerId(InstanceId("worker-0123456789ab")), index, index * 25 * MS, index * 25 * MS)
    gap = WorkerGap(decode_ns=20 * MS, prefill_interference_ns=4 * MS, device_slow_ns=MS)
    return StreamBatch(sampled=rows, stamps=stamps, gaps=(gap,))


class Tokenizer:
    """The requests of one tokenizer, each with a stream whose tokens are words."""

    def __init__(self, num_streams: int) -> None:
        self._requests = OpenRequests()
        for n in range(num_streams):
            stream = TextStream(ByteDetokenizer([b" word"] * 2000))
            request = Request(gateway=GatewayLink(0), attempt=1, job_id=JobId(0), stream=stream)
            self._requests.open(name_of(n), request)

    def take(self, batch: StreamBatch, now_ns: int) -> TextBatch:
        (effect,) = relay(batch, self._requests)
        assert isinstance(effect, ToGateway)
        assert isinstance(effect.message, TextBatch)
        return stamped(effect.message, now_ns)


class Gateway:
    """A core with a call for each stream."""

    def __init__(self, num_streams: int) -> None:
        self._core = StreamCore(retry_after_s=1)
        self._calls = []
        for n in range(num_streams):
            submit = Submit(
                attempt=1,
                model="m",
                prompt=TextPrompt("Hi"),
                choices=(Choice(name_of(n), seed=0),),
                sampling=Sampling(),
                max_tokens=None,
            )
            call = Call(f"call-{n}", (submit,), arrived_ns=0, max_unsent_bytes=1 << 30, tbt_target_ns=100 * MS)
            self._core.open(call, PEER)
            self._calls.append(call)

    def take(self, batch: TextBatch, now_ns: int) -> None:
        self._core.apply(PEER, batch, now_ns)
        for call in self._calls:
            for stream in call.take_fresh():
                stream.take_text()
                stream.mark(now_ns)


def measure(num_streams: int, num_iterations: int) -> dict[str, float]:
    """Median microseconds a token, by hop."""
    tokenizer, gateway = Tokenizer(num_streams), Gateway(num_streams)
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, do: Callable[[], T]) -> T:
        began = time.process_time()
        result = do()
        spent[name].append(1e6 * (time.process_time() - began) / num_streams)
        return result

    tune_garbage_collector()
    for index in range(num_iterations):
        now_ns = (index + 1) * 25 * MS
        batch = stream_batch(num_streams, index)
        data = timed("scheduler packs", partial(encode, batch))
        received = timed("tokenizer unpacks", partial(decode, data))
        assert isinstance(received, StreamBatch)
        relayed = timed("tokenizer", partial(tokenizer.take, received, now_ns))
        data = timed("tokenizer packs", partial(encode, relayed))
        text = timed("gateway unpacks", partial(decode, data))
        assert isinstance(text, TextBatch)
        timed("gateway", partial(gateway.take, text, now_ns))
    step_ms, _ = measure_step(num_streams, 64, num_iterations)
    return {
        "scheduler step": 1e3 * step_ms / num_streams,
        **{name: statistics.median(each) for name, each in spent.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=300)
    options = parser.parse_args()
    costs = measure(options.streams, options.iterations)
    for name, cost_us in costs.items():
        print(f"{name:>16} {cost_us:6.2f} us a token")
    print(f"{'all':>16} {sum(costs.values()):6.2f} us a token")


if __name__ == "__main__":
    main()
