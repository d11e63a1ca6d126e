"""One gateway process for a whole module, where its options do not matter to a test."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.services.gateway.world import BOUND_S, World, world


class Shared:
    """A world that outlives a test, and the loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, here: World) -> None:
        self._runner = runner
        self._here = here

    def run(self, test: Callable[[World], Awaitable[None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(BOUND_S):
                await self._here.start_afresh()
                await test(self._here)

        self._runner.run(bounded())


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        opened = world(max_body_bytes=1_000_000, max_choices=4, max_prompts=3)
        here = runner.run(opened.__aenter__())
        yield Shared(runner, here)
        runner.run(opened.__aexit__(None, None, None))
