"""A line on standard error while a run goes on."""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, cast

from common.clock import NS_PER_S, monotonic_ns
from loadtest.drive import Driver

if TYPE_CHECKING:
    from rich.console import Console

REFRESH_INTERVAL_S = 0.5
PLAIN_INTERVAL_S = 10.0
"""Where nobody watches (a log file), a line this often."""


@asynccontextmanager
async def show_progress(driver: Driver, is_shown: bool) -> AsyncIterator[None]:
    """Show the driver's counts until the block ends."""
    if not is_shown:
        yield
        return
    # Found before the run begins: importing rich takes tens of milliseconds, which the first requests would wait.
    console = _rich_console()
    showing = _print_lines(driver) if console is None else _show(driver, console)
    task = asyncio.create_task(showing, name="progress")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _rich_console() -> "Console | None":
    """A console that can redraw a line; None where rich is not installed or nobody watches."""
    if not sys.stderr.isatty():
        return None
    try:
        console = importlib.import_module("rich.console")
        importlib.import_module("rich.live")
    except ImportError:
        return None
    return cast("Console", console.Console(stderr=True))


async def _show(driver: Driver, console: "Console") -> None:
    from rich.live import Live  # noqa: PLC0415 - optional; imported already.
    from rich.text import Text  # noqa: PLC0415

    # Refreshed by hand: a thread of rich's own would take the interpreter's lock from the reads that are being timed.
    with Live(Text(""), console=console, auto_refresh=False, transient=True) as live:
        begun_ns = monotonic_ns()
        while True:
            live.update(Text(_line(driver, begun_ns)), refresh=True)
            await asyncio.sleep(REFRESH_INTERVAL_S)


async def _print_lines(driver: Driver) -> None:
    begun_ns = monotonic_ns()
    while True:
        await asyncio.sleep(PLAIN_INTERVAL_S)
        print(_line(driver, begun_ns), file=sys.stderr, flush=True)


def _line(driver: Driver, begun_ns: int) -> str:
    elapsed_s = (monotonic_ns() - begun_ns) / NS_PER_S
    return (
        f"{elapsed_s:6.1f} s   sent {driver.num_started}   in flight {driver.num_in_flight}   "
        f"ended {driver.num_ended}   failed {driver.num_failed}   chunks {driver.num_chunks}"
    )
