"""A simulated run as text: one line for each event and each effect, so that two runs can be compared to the byte."""

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TextIO

import msgspec

from common.messages.streams import RequestArrived
from loadtest.simulate.simulation import Observer
from services.scheduler.events import Effect, Event, RunIteration


class EffectsLog:
    """A file of lines `nanoseconds > event` and `nanoseconds < effect`; nothing where there is no path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None

    @property
    def observer(self) -> Observer | None:
        """What the simulation tells its steps; None without a file, so that they cost nothing."""
        return None if self._path is None else self._write

    def __enter__(self) -> "EffectsLog":
        if self._path is not None:
            self._file = self._path.open("w", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, now_ns: int, event: Event, effects: tuple[Effect, ...]) -> None:
        assert self._file is not None, "the log is open while the simulation runs"
        self._file.write(f"{now_ns} > {_without_tokens(event)!r}\n")
        for effect in effects:
            self._file.write(f"{now_ns} < {_without_tokens(effect)!r}\n")


def _without_tokens(told: Event | Effect) -> Event | Effect:
    """The same without token ids, which say nothing here and would make up most of the file."""
    match told:
        case RequestArrived():
            return msgspec.structs.replace(told, token_ids=b"")
        case RunIteration() if told.introduced:
            introduced = tuple(msgspec.structs.replace(request, token_ids=b"") for request in told.introduced)
            return replace(told, introduced=introduced)
        case _:
            return told
