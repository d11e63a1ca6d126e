"""A real browser without a screen, driven over Chromium's own protocol."""

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0


def chromium_or_skip() -> str:
    """The browser's path; without one, the test is skipped and says so."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    pytest.skip("no chromium on this machine: apt-get install chromium")


class Page:
    """One open page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []  # what the page's script threw, or its console called an error
        self._socket = socket
        self._number = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Answer of a method of the DevTools protocol."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while True:
                told = await self._socket.receive_json()
                if told.get("id") == self._number:
                    assert "error" not in told, told
                    answer: dict[str, Any] = told["result"]
                    return answer
                if told.get("method") == "Runtime.exceptionThrown":
                    self.problems.append(json.dumps(told["params"]["exceptionDetails"]))
                if told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                    self.problems.append(told["params"]["entry"]["text"])

    async def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Go there, in a window of that size, with the colours of that scheme."""
        await self.call("Runtime.enable")
        await self.call("Log.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.call("Page.enable")
        await self.call("Page.navigate", url=url)

    async def send_with_all(self, headers: dict[str, str]) -> None:
        """Header fields of every request from now on."""
        await self.call("Network.enable")
        await self.call("Network.setExtraHTTPHeaders", headers=headers)

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def wait_for(self, expression: str) -> None:
        """Until an expression is true; one that throws, as while the page is being loaded, is not."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not await self.value(f"(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()"):
            assert time.monotonic() < deadline, (
                f"never true: {expression}\n{await self.value('document.body.innerText')}"
            )
            await asyncio.sleep(0.1)

    async def screenshot(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@contextlib.contextmanager
def running(chromium: str) -> Iterator[int]:
    """A browser with one blank page; the port that its protocol is served on."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port_file = Path(profile) / "DevToolsActivePort"
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not port_file.is_file() or not port_file.read_text():
                assert process.poll() is None, f"chromium ended with {process.returncode}"
                assert time.monotonic() < deadline, "chromium does not start"
                time.sleep(0.05)
            yield int(port_file.read_text().split()[0])
        finally:
            process.terminate()
            process.wait(30)


@contextlib.asynccontextmanager
async def page_of(port: int) -> AsyncIterator[Page]:
    """The browser's page."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [page for page in await answer.json() if page["type"] == "page"]
        async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            yield Page(socket)
