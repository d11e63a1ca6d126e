"""What experiments share: the systems of the paper, seeds, and how results are written."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.simulate.options import SimulateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Where data lie, and how much may be spent."""

    data: Path | None
    processes: int = 1
    num_seeds: int = 3
    num_requests: int | None = None  # of each run; each experiment has its own default

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.num_seeds))

    def system(self, **changes: Any) -> dict[str, Any]:
        """Options of one system under study: as the paper ran its own, with queues that never refuse."""
        found: dict[str, Any] = {
            "device": "a100-80",
            "max_running": 128,
            "prefix_cache": False,  # No prompt of these traces repeats.
            "max_waiting": 100_000,
            "queue_timeout_s": 3600.0,
            "processes": self.processes,
        }
        if self.data is not None:
            found |= {"traces": self.data / "traces", "profiles": self.data / "profiles"}
        return found | changes

    def options(self, **changes: Any) -> SimulateOptions:
        return SimulateOptions(**self.system(**changes))

    @property
    def data_note(self) -> str:
        """Which data the figures stand on, in words."""
        if self.data is None:
            return "generated lengths and kernel tables (no data folder was given)"
        return "the published length traces and kernel tables"


@dataclass(slots=True, kw_only=True)
class Result:
    """A page and an object, and whether they show what they were to show."""

    name: str
    title: str
    object: dict[str, Any]
    is_as_claimed: bool
    lines: list[str] = field(default_factory=list)

    @property
    def markdown(self) -> str:
        return "\n".join([f"# {self.title}", "", *self.lines, ""])

    def write(self, folder: Path, took_s: float) -> None:
        """Write NAME.md and NAME.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.markdown, encoding="utf-8")
        found = {
            "experiment": self.name,
            "is_as_claimed": self.is_as_claimed,
            "took_s": round(took_s, 1),
            **self.object,
        }
        (folder / f"{self.name}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [
        "| " + " | ".join(header) + " |",
        "| " + " | ".join("---" for _ in header) + " |",
        *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows),
        "",
    ]


def command_of(name: str) -> str:
    return f"`python -m loadtest.simulate.experiments {name} --data DIR`"


def tell(line: str) -> None:
    """Say how far an experiment has come."""
    print(line, file=sys.stderr, flush=True)
