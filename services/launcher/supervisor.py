"""Keeps child processes running: starts them, starts them again when they die, stops them in order."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

log = structlog.get_logger()

FIRST_RESTART_S = 0.2
MAX_RESTART_S = 10.0
"""Pauses before a restart double from the first to the longest."""
STEADY_S = 30.0
"""A child that lived so long starts its back-off from the beginning when it dies."""
MAX_RESTARTS = 10
"""A child that dies so often in a row, each time before STEADY_S, is broken: the system stops."""
EXIT_BAD_OPTIONS = 2
"""What a process of ours returns when it will never run with these options; no restart helps."""


class ChildBroken(Exception):
    """A child cannot be kept running."""


@dataclass(slots=True)
class Child:
    """One process to keep running."""

    name: str  # "worker-0"
    argv: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)  # beside this process's own
    process: asyncio.subprocess.Process | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None


async def keep_running(child: Child) -> None:
    """Run the child until it is asked to stop.

    Raises:
        ChildBroken: If it refuses its options, or dies MAX_RESTARTS times in a row.
    """
    pause_s = FIRST_RESTART_S
    num_restarts = 0
    while not child.stopping.is_set():
        began = time.monotonic()
        # A session of its own: Ctrl-C in a terminal reaches this process alone, which then stops children in order.
        child.process = await asyncio.create_subprocess_exec(
            *child.argv, env={**os.environ, **child.environ}, start_new_session=True
        )
        if child.stopping.is_set():
            _signal(child, signal.SIGTERM)  # Who stopped it while it was being started saw no process.
        status = await child.process.wait()
        if child.stopping.is_set():
            return
        log.error("process_died", name=child.name, status=status, pid=child.process.pid)
        if status == EXIT_BAD_OPTIONS:
            raise ChildBroken(f"{child.name} cannot run with its options; it has said why")
        if time.monotonic() - began > STEADY_S:
            pause_s, num_restarts = FIRST_RESTART_S, 0
        num_restarts += 1
        if num_restarts > MAX_RESTARTS:
            raise ChildBroken(f"{child.name} died {num_restarts} times in a row")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_RESTART_S)


async def stop_all(stages: Sequence[Sequence[Child]], timeout_s: float) -> None:
    """Stop the children, one stage after another; what has not ended timeout_s after its turn came is killed."""
    for stage in stages:
        for child in stage:
            child.stopping.set()
    for stage in stages:
        await _stop_stage([child for child in stage if child.is_running], timeout_s)


async def _stop_stage(children: list[Child], timeout_s: float) -> None:
    for child in children:
        _signal(child, signal.SIGTERM)
    waits = [child.process.wait() for child in children if child.process is not None]
    if not waits:
        return
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*waits)
    except TimeoutError:
        for child in children:
            if child.is_running:
                log.error("process_killed", name=child.name, after_s=timeout_s)
                _signal(child, signal.SIGKILL)


def kill_all(children: Sequence[Child]) -> None:
    """End every child at once."""
    for child in children:
        child.stopping.set()
        if child.is_running:
            _signal(child, signal.SIGKILL)


def legato_argv(command: str, flags: Sequence[str]) -> list[str]:
    """The command line of one of our processes, run by this interpreter."""
    return [sys.executable, "-m", "services.launcher.cli", command, *flags]


def _signal(child: Child, signum: int) -> None:
    assert child.process is not None
    try:
        child.process.send_signal(signum)
    except ProcessLookupError:
        return  # It ended in this moment.
