"""Who asks for what: classes of requests, their shares, lengths and targets, drawn in a fixed order from one seed."""

import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from loadtest.lengths import Sampler, parse_lengths
from loadtest.traces import Trace, load_trace

PairSampler = Callable[[random.Random], tuple[int, int]]
"""Draws a prompt length and an output length."""

MAX_CLASSES = 32
MAX_TURNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """One kind of request."""

    name: str
    lengths: PairSampler
    share: float = 1.0  # of requests, relative to the other classes
    ttft_target_ms: float = 2000.0
    tbt_target_ms: float = 100.0
    prefix_share: float = 0.0
    turns: Sampler = field(default=lambda rng: 1)  # messages per conversation
    think_time_s: float = 0.0  # mean; exponential, between an answer and the user's next message
    body: dict[str, Any] = field(default_factory=dict)  # more fields of the request


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request, or a conversation, before anything of it is sent."""

    index: int
    offset_ns: int  # arrival, from the start of the run
    request_class: RequestClass
    prompt_lens: tuple[int, ...]  # new tokens of each turn
    output_lens: tuple[int, ...]
    think_s: tuple[float, ...]  # before each turn; the first is 0


class _ClassTable(msgspec.Struct, forbid_unknown_fields=True):
    """A [[class]] of a mix file."""

    name: str
    share: float = 1.0
    trace: str | None = None
    prompt_len: str | int = "256"
    output_len: str | int = "128"
    ttft_target_ms: float | None = None
    tbt_target_ms: float | None = None
    prefix_share: float = 0.0
    turns: str | int = "1"
    think_time_s: float = 0.0
    body: dict[str, Any] = {}


class _MixFile(msgspec.Struct, forbid_unknown_fields=True):
    classes: list[_ClassTable] = msgspec.field(name="class")


def plan(classes: tuple[RequestClass, ...], offsets_ns: Iterator[int], seed: int) -> Iterator[Planned]:
    """Yield requests for ever, each a function of the seed and its index alone."""
    shares = [request_class.share for request_class in classes]
    for index, offset_ns in enumerate(offsets_ns):
        rng = random.Random(f"{seed}:{index}:plan")
        request_class = rng.choices(classes, shares)[0]
        num_turns = min(MAX_TURNS, request_class.turns(rng))
        pairs = [request_class.lengths(rng) for _ in range(num_turns)]
        pause_s = request_class.think_time_s
        yield Planned(
            index=index,
            offset_ns=offset_ns,
            request_class=request_class,
            prompt_lens=tuple(prompt_len for prompt_len, _ in pairs),
            output_lens=tuple(output_len for _, output_len in pairs),
            think_s=(0.0, *(rng.expovariate(1 / pause_s) if pause_s else 0.0 for _ in pairs[1:])),
        )


def pairs_of(prompt_len: str, output_len: str) -> PairSampler:
    """Lengths drawn independently of each other.

    Raises:
        ValueError: If a text describes no length.
    """
    prompt, output = parse_lengths(prompt_len), parse_lengths(output_len)
    return lambda rng: (prompt(rng), output(rng))


def pairs_of_trace(trace: Trace) -> PairSampler:
    """Rows of the trace, drawn at random: prompt and output of one row stay together."""
    rows = trace.rows

    def draw(rng: random.Random) -> tuple[int, int]:
        row = rng.choice(rows)
        return row.prompt_len, row.output_len

    return draw


def read_mix(path: Path, defaults: RequestClass, max_total_len: int | None, seed: int) -> tuple[RequestClass, ...]:
    """Return the classes of a TOML file with one [[class]] table each; what a table leaves out, defaults says.

    Raises:
        ValueError: If the file is no such thing.
    """
    try:
        with path.open("rb") as file:
            tables = msgspec.convert(tomllib.load(file), _MixFile).classes
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"--mix {path}: {error}") from error
    names = [table.name for table in tables]
    if not 1 <= len(names) <= MAX_CLASSES or len(set(names)) != len(names):
        raise ValueError(f"--mix {path}: from 1 to {MAX_CLASSES} classes, each with its own name; got {names}")
    for table in tables:
        if table.share <= 0 or not 0 <= table.prefix_share <= 1 or table.think_time_s < 0:
            raise ValueError(
                f"--mix {path}: class {table.name!r} has a share, prefix_share or think_time_s out of range"
            )
    return tuple(_class_of(table, defaults, max_total_len, seed) for table in tables)


def _class_of(table: _ClassTable, defaults: RequestClass, max_total_len: int | None, seed: int) -> RequestClass:
    if table.trace is not None:
        trace = load_trace(table.trace, seed)
        lengths = pairs_of_trace(trace if max_total_len is None else trace.no_longer_than(max_total_len))
    else:
        lengths = pairs_of(str(table.prompt_len), str(table.output_len))
    return RequestClass(
        name=table.name,
        lengths=lengths,
        share=table.share,
        ttft_target_ms=defaults.ttft_target_ms if table.ttft_target_ms is None else table.ttft_target_ms,
        tbt_target_ms=defaults.tbt_target_ms if table.tbt_target_ms is None else table.tbt_target_ms,
        prefix_share=table.prefix_share,
        turns=parse_lengths(str(table.turns)),
        think_time_s=table.think_time_s,
        body=table.body,
    )
