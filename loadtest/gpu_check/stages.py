"""Stages: each with a deadline of its own, and one JSON line, whatever becomes of it."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

GRACE_S = 20.0
"""How far beyond its deadline a stage may be before it counts as hung: kernels cannot be interrupted."""
HUNG_STATUS = 3


class Failed(Exception):
    """A stage's result is beyond its bound; the message says which and by how much."""


class Skipped(Exception):
    """A stage cannot run here; the message says why."""


class Deadline:
    """Until when a stage may start something new."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def is_over(self) -> bool:
        return time.monotonic() >= self._end


@dataclass(slots=True)
class Report:
    """What a check has found so far; prints as it goes."""

    output: TextIO
    copy: TextIO | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        for output in (self.output, self.copy):
            if output is not None:
                print(json.dumps(line), file=output, flush=True)

    @property
    def has_failed(self) -> bool:
        return any(line["status"] in ("failed", "hung") for line in self.lines)


def run_stage(
    report: Report, name: str, seconds: float, run: Callable[[Deadline, dict[str, Any]], None], budget_end: float
) -> None:
    """Run a stage, and report what it put into the dictionary that it is given.

    Args:
        report: Where the line goes.
        name: Of the stage.
        seconds: Its deadline: it starts nothing new afterwards.
        run: Raises Failed or Skipped, or returns.
        budget_end: The whole check's end, on time.monotonic's clock; a stage that would begin after it is skipped.
    """
    left = budget_end - time.monotonic()
    if left <= 0:
        report.add({"stage": name, "status": "skipped", "seconds": 0.0, "why": "the whole check's time is spent"})
        return
    seconds = min(seconds, left)
    detail: dict[str, Any] = {}
    started = time.monotonic()
    watchdog = threading.Timer(seconds + GRACE_S, _give_up, (report, name, seconds, detail))
    watchdog.daemon = True
    watchdog.start()
    line: dict[str, Any] = {"stage": name, "status": "passed"}
    try:
        run(Deadline(seconds), detail)
    except Skipped as why:
        line |= {"status": "skipped", "why": str(why)}
    except Failed as why:
        line |= {"status": "failed", "why": str(why)}
    except Exception as error:
        # Whatever it is, the other stages' results are worth having.
        traceback.print_exc(file=sys.stderr)
        line |= {"status": "failed", "why": f"{type(error).__name__}: {error}"}
    finally:
        watchdog.cancel()
    report.add({**line, "seconds": round(time.monotonic() - started, 2), **detail})


def _give_up(report: Report, name: str, seconds: float, detail: dict[str, Any]) -> None:
    """End the process: a device that hangs takes the thread that waits for it along."""
    report.add({"stage": name, "status": "hung", "seconds": seconds + GRACE_S, **detail})
    os._exit(HUNG_STATUS)
