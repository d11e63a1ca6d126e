"""One generator process: its event loop, and its share of a run."""

import asyncio
import itertools
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvloop

from loadtest.dialect import Dialect
from loadtest.drive import Driver, Outcome
from loadtest.options import LoadOptions
from loadtest.progress import show_progress
from loadtest.prompts import PromptMaker

T = TypeVar("T")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run main on an event loop that is fast enough for a thousand streams."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@contextmanager
def interrupts_to(stop: Callable[[], None]) -> Iterator[None]:
    """Have Ctrl-C call stop within the block, where the loop runs on the main thread; elsewhere there is no Ctrl-C."""
    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        if is_main:
            loop.remove_signal_handler(signal.SIGINT)


async def run_here(
    options: LoadOptions,
    *,
    shard: tuple[int, int] = (0, 1),
    wait_for_start: Callable[[], Awaitable[int]] | None = None,
    is_progress_shown: bool = False,
) -> tuple[Outcome, Dialect, PromptMaker]:
    """Run this process's share of the load.

    Args:
        options: Of the whole run.
        shard: See RunPlan.
        wait_for_start: Awaited once this process is prepared; returns the common start of all processes.
        is_progress_shown: Whether to show a line on standard error.
    """
    trace = options.read_trace()
    classes = options.classes(trace)
    async with options.client() as client:
        dialect, prompts = await options.meet(client)
        driver = Driver(client, dialect, prompts, options.run_plan(shard))
        planned = options.planned(classes, trace)
        start_ns = None if wait_for_start is None else await wait_for_start()
        with interrupts_to(driver.stop):
            async with show_progress(driver, is_shown=is_progress_shown):
                if options.arrivals == "closed":
                    mine = itertools.islice(planned, shard[0], None, shard[1])
                    return await driver.closed_loop(mine, options.users), dialect, prompts
                return await driver.open_loop(planned, start_ns), dialect, prompts
