"""What arrives at the simulated scheduler, one request at a time."""

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

from common.ids import InstanceId, RequestId, TokenizerId
from common.messages.requests import Sampling
from common.messages.streams import RequestArrived
from loadtest import arrivals
from loadtest.traces import Trace, load_trace
from loadtest.workload import PairSampler, RequestClass, pairs_of, pairs_of_trace, plan

TOKENIZER = TokenizerId(InstanceId("tokenizer"))

ArrivalKind = Literal["poisson", "bursty", "constant", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWorkload:
    """A trace of the papers: its file, what of it counts, and lengths to draw where there is no file."""

    file: str
    max_total_len: int
    prompt_len: str
    output_len: str


WORKLOADS = {
    # openchat_sharegpt4 of Sarathi-Serve (OSDI 2024), Table 2.
    "sharegpt": NamedWorkload(
        file="sharegpt_8k.csv",
        max_total_len=8192,
        prompt_len="lognormal:1730:5696:7168",
        output_len="lognormal:415:834:1024",
    ),
    # The paper's arxiv trace is not to be had; rows of POD-Attention's sample up to 16,384 tokens come closest.
    "arxiv": NamedWorkload(
        file="arxiv_sum_4k_to_34k_sample.csv",
        max_total_len=16384,
        prompt_len="lognormal:7059:12985:15360",
        output_len="lognormal:208:371:1024",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request before it is made."""

    index: int
    due_ns: int
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths, and arrivals where a trace has them."""

    lengths: PairSampler
    trace: Trace | None
    source: str  # in words, for the report


@lru_cache(maxsize=8)  # A search asks for the same one many times.
def load_workload(name_or_path: str, traces: Path | None, seed: int) -> Workload:
    """Return a workload of WORKLOADS, or that of a CSV file or of a built-in trace of loadtest.traces.

    Raises:
        TraceError: If there is none of that name, or the file is no trace.
    """
    named = WORKLOADS.get(name_or_path)
    if named is None:
        trace = load_trace(name_or_path, seed)
        return Workload(lengths=pairs_of_trace(trace), trace=trace, source=trace.source)
    if traces is not None and (traces / named.file).is_file():
        trace = load_trace(str(traces / named.file)).no_longer_than(named.max_total_len)
        return Workload(lengths=pairs_of_trace(trace), trace=trace, source=trace.source)
    return Workload(
        lengths=pairs_of(named.prompt_len, named.output_len), trace=None, source=f"drawn lengths of {name_or_path}"
    )


def arrivals_of(
    workload: Workload, kind: ArrivalKind, rate_rps: float | None, num_requests: int, seed: int, burstiness: float = 4.0
) -> Iterator[Arrival]:
    """Yield so many requests, each a function of the seed and its index alone; nothing is kept.

    Raises:
        ValueError: If arrivals of a trace are asked for and it has none, or the rate is no rate.
    """
    rng = random.Random(f"{seed}:arrivals")
    lengths = workload.lengths
    match kind:
        case "poisson":
            offsets_ns = arrivals.poisson(rate_rps or 1.0, rng)
        case "bursty":
            offsets_ns = arrivals.bursty(rate_rps or 1.0, burstiness, rng)
        case "constant":
            offsets_ns = arrivals.constant(rate_rps or 1.0)
        case "trace":
            if workload.trace is None:
                raise ValueError(f"{workload.source} has no arrivals to replay")
            offsets_ns = arrivals.replay(workload.trace.arrivals_ns(), rate_rps)
            rows = sorted(workload.trace.rows, key=lambda row: row.arrival_ns or 0)
            for index, due_ns in enumerate(islice(offsets_ns, num_requests)):
                row = rows[index % len(rows)]
                yield Arrival(index=index, due_ns=due_ns, prompt_len=row.prompt_len, output_len=row.output_len)
            return
    for item in islice(plan((RequestClass(name="all", lengths=lengths),), offsets_ns, seed), num_requests):
        yield Arrival(
            index=item.index, due_ns=item.offset_ns, prompt_len=item.prompt_lens[0], output_len=item.output_lens[0]
        )


def request_of(arrival: Arrival, max_tokens: int | None) -> RequestArrived:
    """Make the request. With max_tokens it declares so many, and an end of sequence ends it; else it declares exactly
    what it will produce."""
    declared = arrival.output_len if max_tokens is None else max(max_tokens, arrival.output_len)
    return RequestArrived(
        request_id=RequestId(f"r{arrival.index}"),
        tokenizer_id=TOKENIZER,
        attempt=1,
        token_ids=_prompt(arrival.index, arrival.prompt_len),
        num_prompt_tokens=arrival.prompt_len,
        max_tokens=declared,
        seed=0,
        sampling=Sampling(ignore_eos=max_tokens is None),
    )


def _prompt(index: int, length: int) -> bytes:
    """Token ids that no other prompt begins with, so that none finds another's prefix in a cache."""
    return struct.pack("<i", index + 10) + bytes(4 * (length - 1))
