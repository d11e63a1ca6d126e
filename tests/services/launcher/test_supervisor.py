"""Children are kept running, and end when they are asked to, whatever they are doing then."""

import asyncio
import sys

from services.launcher.supervisor import Child, keep_running, stop_all

SLEEPER = (sys.executable, "-c", "import time; time.sleep(300)")


def test_a_child_that_is_being_started_when_all_are_stopped_is_stopped_too() -> None:
    async def test() -> None:
        child = Child("sleeper", SLEEPER)
        keeper = asyncio.create_task(keep_running(child))
        await asyncio.sleep(0)  # It has called for the process, and not got it yet.
        assert not child.is_running
        await stop_all([[child]], timeout_s=30.0)
        async with asyncio.timeout(60):
            await keeper
        assert child.process is not None
        assert not child.is_running

    asyncio.run(test())
