"""Photographs the console of a running system: `python -m tests.integration.take_console_images URL FOLDER`."""

import asyncio
import sys
from pathlib import Path

from tests.integration.browser import chromium_or_skip, page_of, running

VIEWS = {
    "console-light": (1280, 860, "light"),
    "console-dark": (1280, 860, "dark"),
    "console-narrow": (400, 1250, "light"),
}


async def take(port: int, url: str, view: tuple[int, int, str]) -> bytes:
    """The console as PNG, while something streams."""
    width, height, scheme = view
    async with page_of(port) as page:
        await page.open(f"{url}/console", width=width, height=height, scheme=scheme)
        await page.wait_for("document.querySelectorAll('#streams tr').length > 0")
        await asyncio.sleep(3.0)  # So that the timeline fills.
        image = await page.screenshot()
        assert not page.problems, page.problems
        return image


def main(url: str, folder: Path) -> None:
    """Write one file for each of VIEWS."""
    folder.mkdir(parents=True, exist_ok=True)
    with running(chromium_or_skip()) as port:
        for name, view in VIEWS.items():
            (folder / f"{name}.png").write_bytes(asyncio.run(take(port, url, view)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
