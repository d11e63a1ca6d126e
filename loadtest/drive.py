"""Sends planned requests at their time, and watches over the run.

A run has three parts. Requests of the *start-up* fill the server; then come the *measured* ones; and in the *drain*
arrivals go on as before, until the last measured request has ended, so that every measured token was made under full
load. Only the measured ones are reported.
"""

import asyncio
import gc
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from common.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from loadtest.client import Client
from loadtest.dialect import Dialect, Message
from loadtest.lag import LoopLagProbe
from loadtest.prompts import PromptMaker
from loadtest.records import RequestRecord
from loadtest.workload import Planned

COARSE_WAIT_S = 0.05
"""Up to this close to an arrival the loop's own timer serves, which is good to a millisecond; then a thread sleeps,
which is good to a tenth, and takes no processor time from the server beside us as spinning would."""

START_LEAD_NS = 50 * NS_PER_MS
"""A run begins so long after it is ready, so that its first request can be built and its tasks be running in time."""

NOT_SENT = "not_sent"
"""The bound on requests in flight was reached. The arrival is counted, never put off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Which requests are measured, and the bounds of a run. One of num_measured and duration_ns is given."""

    startup_ns: int = 0
    num_measured: int | None = None
    duration_ns: int | None = None
    drain_ns: int = 0  # arrivals go on for so long at most after the measured window
    max_in_flight: int = 10_000
    shard: tuple[int, int] = (0, 1)  # (which, of how many): this process takes each requests of index % many == which


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run brought."""

    start_ns: int
    window_start_ns: int = 0
    window_end_ns: int = 0
    records: list[RequestRecord] = field(default_factory=list)
    loop_lags_ns: list[int] = field(default_factory=list)
    was_interrupted: bool = False


class Driver:
    """Drives one run; its counts may be read while it goes on."""

    def __init__(self, client: Client, dialect: Dialect, prompts: PromptMaker, run_plan: RunPlan) -> None:
        self.num_started = 0
        self.num_ended = 0
        self.num_failed = 0
        self.num_chunks = 0  # of ended requests
        self._client = client
        self._dialect = dialect
        self._prompts = prompts
        self._plan = run_plan
        self._outcome = Outcome(start_ns=0)
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_measured_open = 0
        self._num_planned_measured = 0
        self._measured_ended = asyncio.Event()
        self._stopping = asyncio.Event()
        self._sleeper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pacer")

    @property
    def num_in_flight(self) -> int:
        return self.num_started - self.num_ended

    def stop(self) -> None:
        """End the run now. What has been measured so far is reported, and marked."""
        self._outcome.was_interrupted = True
        self._stopping.set()
        self._measured_ended.set()

    async def open_loop(self, planned: Iterator[Planned], start_ns: int | None = None) -> Outcome:
        """Send each request at its offset from start_ns (now), whatever becomes of the others."""
        return await self._run(self._send_on_time(planned), start_ns)

    async def closed_loop(self, planned: Iterator[Planned], num_users: int) -> Outcome:
        """Let num_users each send one request after another; they begin spread over the start-up."""
        return await self._run(self._let_users_in(planned, num_users), None)

    async def _run(self, send_all: Coroutine[Any, Any, None], start_ns: int | None) -> Outcome:
        outcome = self._outcome
        probe = LoopLagProbe()
        # A collection of a large heap stops the loop for tens of milliseconds. What a run leaves in cycles is small.
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            outcome.start_ns = start_ns or monotonic_ns() + START_LEAD_NS
            outcome.window_start_ns = outcome.start_ns + self._plan.startup_ns
            async with asyncio.TaskGroup() as group:
                self._group = group
                probing = group.create_task(probe.run(), name="loop lag probe")
                await send_all
                if self._num_measured_open:
                    await self._measured_ended.wait()
                outcome.window_end_ns = outcome.window_end_ns or monotonic_ns()
                for task in [probing, *self._tasks]:
                    task.cancel()
        finally:
            gc.enable()
            gc.unfreeze()
            self._sleeper.shutdown(wait=False)
        outcome.loop_lags_ns = probe.lags_ns
        return outcome

    async def _send_on_time(self, planned: Iterator[Planned]) -> None:
        which, many = self._plan.shard
        for item in planned:
            scheduled_ns = self._outcome.start_ns + item.offset_ns
            is_measured = self._claims(scheduled_ns)
            if self._outcome.window_end_ns:
                if self._num_measured_open == 0:
                    return
                if scheduled_ns >= self._outcome.window_end_ns + self._plan.drain_ns:
                    return
            if item.index % many != which:
                continue
            body = self._body(item, 0, [])  # Before the wait: building it takes time, and now there is some.
            if not await self._wait_until(scheduled_ns):
                return
            self._launch(item, scheduled_ns, is_measured, body)

    def _claims(self, scheduled_ns: int) -> bool:
        """Whether a request of this time is measured; closes the window at the first that comes after it."""
        outcome, plan = self._outcome, self._plan
        if outcome.window_end_ns or scheduled_ns < outcome.window_start_ns:
            return False
        is_over = (plan.num_measured is not None and self._num_planned_measured >= plan.num_measured) or (
            plan.duration_ns is not None and scheduled_ns >= outcome.window_start_ns + plan.duration_ns
        )
        if is_over:
            outcome.window_end_ns = scheduled_ns
            if self._num_measured_open == 0:
                self._measured_ended.set()
            return False
        self._num_planned_measured += 1
        return True

    async def _wait_until(self, due_ns: int) -> bool:
        """Wait for an arrival; False if there is no need to send it any more."""
        wake = self._measured_ended if self._outcome.window_end_ns else self._stopping
        coarse_s = (due_ns - monotonic_ns()) / NS_PER_S - COARSE_WAIT_S
        if coarse_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), coarse_s)
        if not wake.is_set() and due_ns > monotonic_ns():
            await asyncio.get_running_loop().run_in_executor(self._sleeper, _sleep_until, due_ns)
        return not wake.is_set()

    def _launch(self, item: Planned, scheduled_ns: int, is_measured: bool, body: bytes) -> None:
        if is_measured:
            self._num_measured_open += 1
        self._start(self._converse(item, scheduled_ns, is_measured, body), name=f"request {item.index}")

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        assert self._group is not None, "a run is on"
        task = self._group.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _let_users_in(self, planned: Iterator[Planned], num_users: int) -> None:
        which, many = self._plan.shard
        for user in range(which, num_users, many):
            due_ns = self._outcome.start_ns + self._plan.startup_ns * user // num_users
            if due_ns > monotonic_ns() and not await self._wait_until(due_ns):
                return
            self._start(self._use(planned), name=f"user {user}")
        await self._measured_ended.wait()
        # The window closes when a request comes that is no longer measured; here, in the end, when all are done.
        self._outcome.window_end_ns = monotonic_ns()

    async def _use(self, planned: Iterator[Planned]) -> None:
        """One user, until the run is over."""
        for item in planned:
            now_ns = monotonic_ns()
            is_measured = self._claims(now_ns)
            if self._outcome.window_end_ns and now_ns >= self._outcome.window_end_ns + self._plan.drain_ns:
                return
            if is_measured:
                self._num_measured_open += 1
            await self._converse(item, now_ns, is_measured, self._body(item, 0, []))

    async def _converse(self, item: Planned, scheduled_ns: int, is_measured: bool, body: bytes) -> None:
        """Send a request and, in a conversation, those that follow from its answer."""
        history: list[Message] = []
        num_turns = len(item.prompt_lens)
        try:
            for turn in range(num_turns):
                if turn:
                    body = self._body(item, turn, history)
                    scheduled_ns = monotonic_ns() + round(item.think_s[turn] * NS_PER_S)
                    await asyncio.sleep(item.think_s[turn])
                record = RequestRecord(
                    index=item.index,
                    turn=turn,
                    class_name=item.request_class.name,
                    is_measured=is_measured,
                    prompt_len=item.prompt_lens[turn],
                    output_len=item.output_lens[turn],
                    scheduled_ns=scheduled_ns,
                    started_ns=max(scheduled_ns, monotonic_ns()),
                )
                text = await self._send(record, body, keep_text=turn + 1 < num_turns)
                if not record.is_ok:
                    return
                history += [
                    {"role": "user", "content": self._text(item, turn)},
                    {"role": "assistant", "content": text},
                ]
        finally:
            if is_measured:
                self._num_measured_open -= 1
                if self._num_measured_open == 0 and self._outcome.window_end_ns:
                    self._measured_ended.set()

    async def _send(self, record: RequestRecord, body: bytes, keep_text: bool) -> str:
        self._outcome.records.append(record)
        if self.num_in_flight >= self._plan.max_in_flight:
            record.error, record.ended_ns = NOT_SENT, record.started_ns
            self.num_failed += 1
            return ""
        self.num_started += 1
        try:
            return await self._client.stream(self._dialect.path, body, record, keep_text)
        finally:
            self.num_ended += 1
            self.num_failed += record.is_failed
            self.num_chunks += len(record.chunk_ns)

    def _body(self, item: Planned, turn: int, history: list[Message]) -> bytes:
        more = item.request_class.body
        if self._dialect.endpoint == "chat":
            messages = [*history, {"role": "user", "content": self._text(item, turn)}]
            return self._dialect.body(messages, item.output_lens[turn], more)
        prompt = self._prompts.make(item.prompt_lens[turn], item.index, turn, item.request_class.prefix_share)
        if isinstance(prompt, str):
            prompt = "".join(message["content"] for message in history) + prompt
        return self._dialect.body(prompt, item.output_lens[turn], more)

    def _text(self, item: Planned, turn: int) -> str:
        prompt = self._prompts.make(item.prompt_lens[turn], item.index, turn, item.request_class.prefix_share)
        return prompt if isinstance(prompt, str) else ""


def _sleep_until(due_ns: int) -> None:
    remaining_s = (due_ns - monotonic_ns()) / NS_PER_S
    if remaining_s > 0:
        time.sleep(remaining_s)
