"""What the tests of whole runs share."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from loadtest.drive import Outcome
from loadtest.options import LoadOptions
from loadtest.records import RequestRecord
from loadtest.single import run_here, run_loop
from tests.loadtest.fake_server import FakeServer, Script

QUICK: dict[str, Any] = {"startup_s": 0.0, "drain_s": 0.0, "prompt_len": "20", "output_len": "5"}

NUM_TRY_OUT_REQUESTS = 1


def bounded_run(main: Callable[[], Any]) -> Any:
    """Run main on the generator's event loop, two minutes at most."""

    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await main()

    return run_loop(bounded())


def outcome_of(server: FakeServer, meanwhile: Callable[[], Any] | None = None, **options: Any) -> Outcome:
    """Drive the server with these options; run meanwhile beside it."""

    async def main() -> Outcome:
        async with server.serving():
            chosen = LoadOptions(**{**QUICK, **options, "base_url": server.url})
            async with asyncio.TaskGroup() as group:
                beside = group.create_task(meanwhile()) if meanwhile is not None else None
                outcome, _, _ = await run_here(chosen)
                if beside is not None:
                    beside.cancel()
            return outcome

    outcome: Outcome = bounded_run(main)
    return outcome


def measured(outcome: Outcome) -> list[RequestRecord]:
    return [record for record in outcome.records if record.is_measured]


@contextmanager
def server_beside(
    script_of: Callable[[dict[str, Any]], Script] | None = None, server: FakeServer | None = None
) -> Iterator[FakeServer]:
    """A server on a thread with an event loop of its own, for commands that bring theirs."""
    server = server or FakeServer(script_of)
    ready, over = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        async with server.serving():
            loops.append(asyncio.get_running_loop())
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="fake server")
    thread.start()
    try:
        assert ready.wait(60), "the fake server did not start"
        yield server
    finally:
        loops[0].call_soon_threadsafe(over.set)
        thread.join(60)


def read(path: Any) -> Any:
    return json.loads(path.read_text())
