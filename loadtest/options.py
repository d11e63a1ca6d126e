"""Options of the sub-commands, and what they turn into."""

import argparse
import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from common.clock import NS_PER_S
from common.config import add_options, load, option
from loadtest import arrivals
from loadtest.client import Client, ClientLimits
from loadtest.dialect import Dialect, Endpoint, find_model, try_out
from loadtest.drive import RunPlan
from loadtest.lengths import parse_lengths
from loadtest.prompts import PromptMaker, vocabulary_of_file, vocabulary_of_server
from loadtest.traces import Trace, load_trace
from loadtest.workload import Planned, RequestClass, pairs_of, pairs_of_trace, plan, read_mix

ArrivalKind = Literal["poisson", "constant", "bursty", "trace", "closed"]

DEFAULT_NUM_REQUESTS = 100
TRY_OUT_LEN = 16
API_KEY_VARIABLE = "LEGATO_API_KEY"

T = TypeVar("T")


def options_from(config_type: type[T], command: str, argv: Sequence[str]) -> T:
    """Return a sub-command's options from its flags. Of the environment only the API key is read: the other
    LEGATO_ variables configure a server, and would steer a load test unseen.

    Raises:
        ConfigError: If an option is wrong.
        SystemExit: From argparse, for unknown flags and --help.
    """
    parser = argparse.ArgumentParser(prog=f"legato load {command}")
    add_options(parser, config_type)
    key = os.environ.get(API_KEY_VARIABLE)
    return load(config_type, command, vars(parser.parse_args(argv)), {} if not key else {API_KEY_VARIABLE: key})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Which server, and how to talk to it."""

    base_url: str = option("http://127.0.0.1:8000", "address of an OpenAI-compatible server, with or without /v1")
    api_key: str = option("", "sent as bearer token; better given as LEGATO_API_KEY, which no process list shows")
    model: str = option("", "model to ask for; else the first that /v1/models names")
    endpoint: Endpoint = option("completions", "chat adds the server's template to each prompt's length")
    tokenizer: Path | None = option(None, "tokenizer.json for exact prompt lengths; else the server's /tokenize serves")
    prompt_kind: Literal["text", "ids"] = option("text", "ids sends token ids, whose number is exact by nature")
    vocab_size: int | None = option(None, "size of the vocabulary; needed for ids without --tokenizer")
    temperature: float = option(0.0, "sampling temperature")
    ignore_eos: Literal["auto", "true", "false"] = option(
        "auto", "force output lengths; auto asks for it and goes without where the server refuses"
    )
    extra_body: str = option("{}", "JSON object merged into each request", metavar="JSON")
    request_timeout_s: float = option(300.0, "a request that takes longer counts as failed")
    connect_timeout_s: float = option(10.0, "a connection that takes longer counts as failed")
    seed: int = option(0, "arrivals, lengths and prompts are functions of it")
    ttft_target_ms: float = option(2000.0, "TTFT above this misses the target")
    tbt_target_ms: float = option(100.0, "a gap between tokens above this is a stall")

    def __post_init__(self) -> None:
        Client(self.base_url)  # Refuses a bad address now rather than later.
        if not isinstance(_json_of(self.extra_body), dict):
            raise ValueError(f"--extra-body {self.extra_body!r} is no JSON object")
        if self.endpoint == "chat" and self.prompt_kind == "ids":
            raise ValueError("--endpoint chat takes messages, which --prompt-kind ids cannot be")
        for name in ("request_timeout_s", "connect_timeout_s", "ttft_target_ms", "tbt_target_ms"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")

    def client(self) -> Client:
        limits = ClientLimits(connect_timeout_s=self.connect_timeout_s, request_timeout_s=self.request_timeout_s)
        return Client(self.base_url, self.api_key, limits)

    async def meet(self, client: Client) -> tuple[Dialect, PromptMaker]:
        """Learn what the server understands, and make prompts for it.

        Raises:
            ServerUnusable, RequestFailed: If the server cannot be used.
            ValueError: If the options do not suffice for it.
        """
        model = self.model or await find_model(client)
        as_ids = self.prompt_kind == "ids"
        if self.tokenizer is not None:
            vocabulary = vocabulary_of_file(self.tokenizer, as_ids)
        else:
            vocabulary = await vocabulary_of_server(client, model, as_ids, self.vocab_size)
        prompts = PromptMaker(vocabulary, self.seed)
        wanted = Dialect(
            model=model,
            endpoint=self.endpoint,
            has_ignore_eos=self.ignore_eos != "false",
            has_min_tokens=self.ignore_eos != "false",
            temperature=self.temperature,
            extra=_json_of(self.extra_body),
        )
        dialect = await try_out(client, wanted, prompts.make(TRY_OUT_LEN, index=-1))
        if self.ignore_eos == "true" and not dialect.has_ignore_eos:
            raise ValueError("--ignore-eos true: this server refuses ignore_eos")
        return dialect, prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(ServerOptions):
    """What to send."""

    arrivals: ArrivalKind = option("poisson", "when requests arrive; closed: --users that wait for their answers")
    rate: float | None = option(None, "requests per second (1 unless a trace says otherwise)")
    burstiness: float = option(4.0, "of bursty arrivals: squared coefficient of variation; 1 is Poisson")
    users: int = option(8, "of closed arrivals: how many send one request after another")
    requests: int | None = option(None, f"requests to measure ({DEFAULT_NUM_REQUESTS} unless --duration is given)")
    duration: float | None = option(None, "seconds to measure, instead of --requests")
    prompt_len: str = option("256", "tokens: 128, uniform:64:512, lognormal:MEDIAN:P90[:MAX], exp:MEAN, choice:64,1500")
    output_len: str = option("128", "tokens, written as for --prompt-len")
    trace: str | None = option(None, "CSV file with lengths (and arrivals), or a built-in name such as azure_2023_conv")
    mix: Path | None = option(None, "TOML file with a [[class]] table per class: name, share, lengths, targets")
    max_total_len: int | None = option(None, "leave out rows of a trace whose prompt and output are longer than this")
    prefix_share: float = option(0.0, "share of each prompt's tokens that all prompts begin with, 0 to 1")
    turns: str = option("1", "messages per conversation, written as for --prompt-len")
    think_time_s: float = option(0.0, "mean pause of a user between answer and next message (exponential)")
    startup_s: float = option(2.0, "load before the measured window")
    drain_s: float = option(30.0, "load goes on while measured requests run, for so long at most")
    max_in_flight: int = option(10_000, "requests in flight at most; beyond, arrivals count as errors")
    processes: int = option(1, "generator processes, which share the arrivals")

    def __post_init__(self) -> None:
        ServerOptions.__post_init__(self)
        if self.requests is not None and self.duration is not None:
            raise ValueError(f"--requests {self.requests} and --duration {self.duration}: give one of them")
        if self.mix is not None and self.trace is not None and self.arrivals != "trace":
            raise ValueError("--mix and --trace: give one of them, or name the trace in the mix")
        if self.arrivals == "trace" and self.trace is None:
            raise ValueError("--arrivals trace needs --trace")
        for name in ("rate", "requests", "duration", "users", "burstiness", "max_in_flight", "processes"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
        for name in ("startup_s", "drain_s", "think_time_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must not be negative")
        if not 0 <= self.prefix_share <= 1:
            raise ValueError(f"--prefix-share is {self.prefix_share}; it lies between 0 and 1")
        if self.processes > 1 and self.arrivals == "closed" and self.users < self.processes:
            raise ValueError(f"--users {self.users} is below --processes {self.processes}")
        parse_lengths(self.turns)
        pairs_of(self.prompt_len, self.output_len)

    def read_trace(self) -> Trace | None:
        """Raises TraceError (a ValueError)."""
        if self.trace is None:
            return None
        trace = load_trace(self.trace, self.seed)
        return trace if self.max_total_len is None else trace.no_longer_than(self.max_total_len)

    def classes(self, trace: Trace | None) -> tuple[RequestClass, ...]:
        """Raises ValueError for an unusable mix file."""
        default = RequestClass(
            name="default",
            lengths=pairs_of_trace(trace) if trace else pairs_of(self.prompt_len, self.output_len),
            ttft_target_ms=self.ttft_target_ms,
            tbt_target_ms=self.tbt_target_ms,
            prefix_share=self.prefix_share,
            turns=parse_lengths(self.turns),
            think_time_s=self.think_time_s,
        )
        return (default,) if self.mix is None else read_mix(self.mix, default, self.max_total_len, self.seed)

    def planned(self, classes: tuple[RequestClass, ...], trace: Trace | None) -> Iterator[Planned]:
        """All requests that could ever be sent, in order."""
        rng = random.Random(f"{self.seed}:arrivals")
        rate_rps = self.rate or 1.0
        match self.arrivals:
            case "poisson":
                offsets_ns = arrivals.poisson(rate_rps, rng)
            case "constant":
                offsets_ns = arrivals.constant(rate_rps)
            case "bursty":
                offsets_ns = arrivals.bursty(rate_rps, self.burstiness, rng)
            case "closed":
                offsets_ns = itertools.repeat(0)  # A user's next request comes when the last is answered.
            case "trace":
                assert trace is not None, "checked with the options"
                return self._replayed(classes, trace)
        return plan(classes, offsets_ns, self.seed)

    def run_plan(self, shard: tuple[int, int] = (0, 1)) -> RunPlan:
        num_measured = self.requests
        if num_measured is None and self.duration is None:
            num_measured = DEFAULT_NUM_REQUESTS
        if num_measured is not None and self.arrivals == "closed":
            # Users of different processes cannot count together; each process measures its share.
            num_measured = len(range(shard[0], num_measured, shard[1]))
        return RunPlan(
            startup_ns=round(self.startup_s * NS_PER_S),
            num_measured=num_measured,
            duration_ns=None if self.duration is None else round(self.duration * NS_PER_S),
            drain_ns=round(self.drain_s * NS_PER_S),
            max_in_flight=max(1, self.max_in_flight // shard[1]),
            shard=shard,
        )

    def _replayed(self, classes: tuple[RequestClass, ...], trace: Trace) -> Iterator[Planned]:
        """The trace as it was: each arrival with the lengths of its own row (unless a mix gives lengths)."""
        rows = sorted(trace.rows, key=lambda row: row.arrival_ns or 0)
        offsets_ns = arrivals.replay(trace.arrivals_ns(), self.rate)
        for item, row in zip(plan(classes, offsets_ns, self.seed), itertools.cycle(rows), strict=False):
            if self.mix is not None or len(item.prompt_lens) > 1:
                yield item
            else:
                yield replace(item, prompt_lens=(row.prompt_len,), output_lens=(row.output_len,))


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None
