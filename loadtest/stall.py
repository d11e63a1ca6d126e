"""`legato load stall`: N steady streams, and a long prompt every few seconds. What do the streams feel of it?

The streams run alone first, then with the injected prompts, then alone again; see loadtest.stall_phases.
"""

import asyncio
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.clock import NS_PER_S, monotonic_ns
from common.config import option
from loadtest import report
from loadtest.client import Client, RequestFailed
from loadtest.dialect import Dialect, ServerUnusable
from loadtest.drive import Outcome
from loadtest.lag import LoopLagProbe
from loadtest.options import ServerOptions
from loadtest.png import check_png, write_png
from loadtest.prompts import PromptMaker
from loadtest.records import RequestRecord
from loadtest.single import interrupts_to, run_loop
from loadtest.stall_phases import INJECTED, STEADY, StallOutcome, stall_charts, stall_report, stall_text

MAX_FAILURES_IN_A_ROW = 5
"""A steady stream that fails so often in a row gives up, and the run with it."""
RETRY_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StallOptions(ServerOptions):
    """Options of `legato load stall`."""

    streams: int = option(8, "steady streams")
    prompt_len: int = option(64, "tokens of a steady stream's prompt")
    output_len: int = option(512, "tokens of a steady stream's answer; then the next begins at once")
    inject_prompt_len: int = option(4000, "tokens of an injected prompt")
    inject_output_len: int = option(4, "tokens of its answer")
    every_s: float = option(5.0, "seconds between injected prompts")
    injections: int = option(6, "injected prompts")
    startup_s: float = option(3.0, "seconds for the streams to settle, not measured")
    before_s: float = option(10.0, "seconds measured before the first injected prompt")
    after_s: float = option(10.0, "seconds measured after the last one has ended")
    json: Path | None = option(None, "write the result here, as one JSON object")
    html: Path | None = option(None, "write a page with plots here")
    png: Path | None = option(None, "write the plots here (needs matplotlib)")

    def __post_init__(self) -> None:
        ServerOptions.__post_init__(self)
        for name in ("streams", "prompt_len", "output_len", "inject_prompt_len", "inject_output_len", "injections"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; the least is 1")
        for name in ("every_s", "before_s", "after_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")
        if self.png is not None:
            check_png()


def stall(options: StallOptions) -> int:
    """Carry out the test; 0 if it is valid, 1 if not, 2 if it could not be begun."""
    try:
        outcome, dialect = run_loop(_measure(options))
    except (ServerUnusable, RequestFailed, ValueError) as error:
        print(f"legato load stall: {error}", file=sys.stderr)
        return 2
    found = stall_report(outcome)
    found["detail"] |= {
        "model": dialect.model,
        "forced_lengths": dialect.has_ignore_eos,
        "seed": options.seed,
        "every_s": options.every_s,
    }
    charts = stall_charts(outcome)
    text = stall_text(found)
    if options.json is not None:
        report.write_json(options.json, found)
    if options.html is not None:
        report.write_html(options.html, "Stall test", text, charts, found)
    if options.png is not None:
        write_png(options.png, charts)
    print(text)
    return 0 if found["valid"] else 1


async def _measure(options: StallOptions) -> tuple[StallOutcome, Dialect]:
    async with options.client() as client:
        dialect, prompts = await options.meet(client)
        test = _StallTest(options, client, dialect, prompts)
        with interrupts_to(test.stop):
            return await test.run(), dialect


class _StallTest:
    """Drives the streams and the injections."""

    def __init__(self, options: StallOptions, client: Client, dialect: Dialect, prompts: PromptMaker) -> None:
        self._options = options
        self._client = client
        self._dialect = dialect
        self._prompts = prompts
        self._numbers = itertools.count()
        self._over = asyncio.Event()
        self._has_given_up = False
        self._run = Outcome(start_ns=monotonic_ns())

    def stop(self) -> None:
        """End the test now."""
        self._run.was_interrupted = True
        self._over.set()

    async def run(self) -> StallOutcome:
        options, probe = self._options, LoopLagProbe()
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(probe.run(), name="loop lag probe"),
                *(group.create_task(self._stream_on(), name=f"stream {i}") for i in range(options.streams)),
            ]
            await self._pause(options.startup_s)
            self._run.window_start_ns = monotonic_ns()
            await self._pause(options.before_s)
            first_injection_ns = monotonic_ns()
            await self._inject()
            last_end_ns = monotonic_ns()
            await self._pause(options.after_s)
            self._run.window_end_ns = monotonic_ns()
            for task in background:
                task.cancel()
        self._run.loop_lags_ns = probe.lags_ns
        return StallOutcome(
            run=self._run,
            first_injection_ns=first_injection_ns,
            last_end_ns=last_end_ns,
            has_given_up=self._has_given_up,
            num_streams=options.streams,
            inject_prompt_len=options.inject_prompt_len,
            tbt_target_ms=options.tbt_target_ms,
        )

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except TimeoutError:
            return

    async def _stream_on(self) -> None:
        """One steady stream: answer after answer."""
        num_failures = 0
        while num_failures < MAX_FAILURES_IN_A_ROW:
            record = self._record(STEADY, self._options.prompt_len, self._options.output_len)
            await self._send(record)
            num_failures = num_failures + 1 if record.is_failed else 0
            if record.is_failed:
                await asyncio.sleep(RETRY_PAUSE_S)
        self._has_given_up = True
        self._over.set()

    async def _inject(self) -> None:
        """Send long prompts at their times, whether or not the last one has been answered, and await them all."""
        options = self._options
        begun_ns = monotonic_ns()
        async with asyncio.TaskGroup() as group:
            for number in range(options.injections):
                due_ns = begun_ns + round(number * options.every_s * NS_PER_S)
                await self._pause(max(0.0, (due_ns - monotonic_ns()) / NS_PER_S))
                if self._over.is_set():
                    return
                record = self._record(INJECTED, options.inject_prompt_len, options.inject_output_len, due_ns)
                group.create_task(self._send(record), name=f"injection {number}")

    def _record(self, class_name: str, prompt_len: int, output_len: int, due_ns: int | None = None) -> RequestRecord:
        now_ns = monotonic_ns()
        record = RequestRecord(
            index=next(self._numbers),
            class_name=class_name,
            prompt_len=prompt_len,
            output_len=output_len,
            scheduled_ns=now_ns if due_ns is None else due_ns,
            started_ns=now_ns if due_ns is None else max(due_ns, now_ns),
        )
        self._run.records.append(record)
        return record

    async def _send(self, record: RequestRecord) -> None:
        prompt = self._prompts.make(record.prompt_len, record.index)
        content: Any = [{"role": "user", "content": prompt}] if self._dialect.endpoint == "chat" else prompt
        await self._client.stream(self._dialect.path, self._dialect.body(content, record.output_len, {}), record)
