"""One run in several generator processes: each takes its share of the same planned arrivals.

The processes plan alike, from one seed, and take every n-th request; the monotonic clock is the machine's, so their
times can be laid side by side. A child says when it is prepared, is told the common start on its standard input, and
leaves its records in a file.
"""

import asyncio
import dataclasses
import json
import sys
import tempfile
from array import array
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import msgspec

from common.clock import NS_PER_MS, monotonic_ns
from loadtest.drive import Outcome
from loadtest.options import LoadOptions
from loadtest.records import RequestRecord
from loadtest.single import run_here, run_loop

READY_TIMEOUT_S = 120.0
START_DELAY_NS = 200 * NS_PER_MS
END_TIMEOUT_S = 24 * 3600.0
READY = b"ready\n"


class ShardFailed(Exception):
    """A generator process ended without records."""


async def run_shards(options: LoadOptions) -> Outcome:
    """Run the load in options.processes children and return what all of them saw.

    Raises:
        ShardFailed: If one of them fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / f"{which}.json" for which in range(options.processes)]
        children = [await _start(options, which, file) for which, file in enumerate(files)]
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                for child in children:
                    assert child.stdout is not None, "opened as a pipe"
                    if await child.stdout.readline() != READY:
                        raise ShardFailed("a generator process could not prepare itself; see above")
            start_ns = monotonic_ns() + START_DELAY_NS
            for child in children:
                assert child.stdin is not None, "opened as a pipe"
                child.stdin.write(f"{start_ns}\n".encode())
            async with asyncio.timeout(END_TIMEOUT_S):
                for child in children:
                    if await child.wait() != 0:
                        raise ShardFailed("a generator process failed; see above")
        except TimeoutError as error:
            raise ShardFailed("a generator process did not get ready in time") from error
        finally:
            for child in children:
                if child.returncode is None:
                    child.kill()
                    await child.wait()
        return _merge([json.loads(file.read_text()) for file in files])


def run_child(which: int, file: Path) -> int:
    """Be one of the processes. The options come on the first line of standard input, the start on the second."""
    options = msgspec.json.decode(sys.stdin.readline(), type=LoadOptions, dec_hook=lambda kind, value: kind(value))

    async def main() -> Outcome:
        outcome, _, _ = await run_here(options, shard=(which, options.processes), wait_for_start=_wait_for_start)
        return outcome

    outcome = run_loop(main())
    fields = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    file.write_text(json.dumps({**fields, "records": [_as_json(record) for record in outcome.records]}))
    return 0


async def _wait_for_start() -> int:
    """Tell the parent that this process is prepared; return the common start."""
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return int(line)


async def _start(options: LoadOptions, which: int, file: Path) -> Process:
    command = [sys.executable, "-m", "loadtest", "shard", str(which), str(file)]
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    # Not by the command line, which everyone on the machine can read: the API key is among them.
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(LoadOptions)}
    assert child.stdin is not None, "opened as a pipe"
    child.stdin.write(msgspec.json.encode(fields, enc_hook=str) + b"\n")
    return child


def _merge(parts: list[dict[str, Any]]) -> Outcome:
    records = [_from_json(row) for part in parts for row in part["records"]]
    return Outcome(
        start_ns=min(part["start_ns"] for part in parts),
        window_start_ns=min(part["window_start_ns"] for part in parts),
        window_end_ns=max(part["window_end_ns"] for part in parts),
        records=sorted(records, key=lambda record: (record.scheduled_ns, record.turn)),
        loop_lags_ns=[lag_ns for part in parts for lag_ns in part["loop_lags_ns"]],
        was_interrupted=any(part["was_interrupted"] for part in parts),
    )


def _as_json(record: RequestRecord) -> dict[str, Any]:
    row = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {**row, "chunk_ns": list(record.chunk_ns), "silent_ns": list(record.silent_ns)}


def _from_json(row: dict[str, Any]) -> RequestRecord:
    return RequestRecord(**{**row, "chunk_ns": array("q", row["chunk_ns"]), "silent_ns": array("q", row["silent_ns"])})
