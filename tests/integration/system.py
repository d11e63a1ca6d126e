"""The whole system as a user starts it: `legato up` with real processes, sockets and a real model."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import requests

from tests.ports import free_port

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 70.0
ORPHAN_TIMEOUT_S = 30.0
"""For processes of a system that has ended."""
SETTLE_TIMEOUT_S = 60.0
HTTP_TIMEOUT_S = 600.0
"""Longer than most tests may take: a prompt of 4,000 tokens beside seven others has taken minutes on half a core."""
HEARTBEAT_TIMEOUT_MS = 10_000
"""A machine that stands still for some seconds must not look like a process that is lost; one that is killed is seen at
once all the same."""


class System:
    """A running `legato up`."""

    def __init__(self, *flags: str, environ: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._fits = tempfile.TemporaryDirectory()
        self._lines: list[dict[str, Any]] = []
        self._has_line = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.launcher.cli", "up", "--port", str(self.port), *flags],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "LEGATO_FITS": self._fits.name,
                "LEGATO_RECORDINGS": f"{self._fits.name}/recordings",
                "LEGATO_HEARTBEAT_TIMEOUT_MS": str(HEARTBEAT_TIMEOUT_MS),
                **(environ or {}),
            },
        )
        self.printed: list[str] = []
        self._pumps = [
            threading.Thread(target=_pump, args=(stream, take), daemon=True)
            for stream, take in ((self.process.stderr, self._take_log), (self.process.stdout, self.printed.append))
        ]
        for pump in self._pumps:
            pump.start()
        self.session = requests.Session()

    def wait_ready(self) -> "System":
        wait_until(self.is_ready, START_TIMEOUT_S, "the system to be ready", self.describe)
        return self

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"legato up ended with {self.process.returncode}: {self.describe()}"
        with contextlib.suppress(requests.RequestException):
            return self.get("/health/ready").status_code == 200
        return False

    def stop(self) -> int:
        """Ctrl-C; the exit status.

        Raises:
            AssertionError: If a process of the system outlives it.
        """
        self.session.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._see_all_end()
            for pump in self._pumps:
                pump.join(ORPHAN_TIMEOUT_S)
                assert not pump.is_alive(), "somebody holds a pipe of a system that has ended"
            self._fits.cleanup()

    # --- looking inside

    def log(self, event: str) -> list[dict[str, Any]]:
        """Log lines of that event so far."""
        with self._has_line:
            return [line for line in self._lines if line.get("event") == event]

    def instances(self, role: str) -> list[str]:
        """Instance ids that processes of the role have had, in order."""
        return [line["instance"] for line in self.log("process_started") if line["role"] == role]

    def admin_url(self, role: str) -> str:
        """Where the latest process of the role serves its metrics."""
        return str([line["admin"] for line in self.log("process_started") if line["role"] == role][-1])

    def metric(self, role: str, name: str) -> float:
        """The value of a metric without labels."""
        text = requests.get(f"{self.admin_url(role)}/metrics", timeout=HTTP_TIMEOUT_S).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"{role} has no metric {name}"
        return float(found.group(1))

    def child_pids(self, module: str = "") -> list[int]:
        """Processes that `legato up` runs now; those of one command if given."""
        pids = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (entry / "cmdline").read_text().split("\0")
                if parent == self.process.pid and (not module or module in command):
                    pids.append(int(entry.name))
        return pids

    def _see_all_end(self) -> None:
        """Wait until no process of this system is left; kill what does not end.

        Raises:
            AssertionError: If there was one to kill.
        """
        mark = f"LEGATO_FITS={self._fits.name}".encode()
        try:
            wait_until(lambda: not _pids_with(mark), ORPHAN_TIMEOUT_S, "every process to end", lambda: _pids_with(mark))
        finally:
            for pid in _pids_with(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cpu_seconds(self) -> float:
        """CPU time that the launcher and its children have used."""
        ticks = 0
        for pid in (self.process.pid, *self.child_pids()):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def wait_idle(self) -> None:
        """Until no request is open and every KV block is free."""
        wait_until(
            lambda: (
                self.metric("scheduler", "legato_scheduler_requests_running") == 0
                and self.metric("scheduler", "legato_scheduler_requests_waiting") == 0
                and self.metric("scheduler", "legato_scheduler_kv_blocks_used") == 0
            ),
            SETTLE_TIMEOUT_S,
            "every KV block to be free",
            self.describe,
        )

    def describe(self) -> str:
        with self._has_line:
            return "\n".join(json.dumps(line) for line in self._lines[-30:])

    # --- using it

    def get(self, path: str) -> requests.Response:
        return self.session.get(self.url + path, timeout=HTTP_TIMEOUT_S)

    def post(self, path: str, body: dict[str, Any]) -> requests.Response:
        return self.session.post(self.url + path, json=body, timeout=HTTP_TIMEOUT_S)

    def complete(self, prompt: str | list[Any], **parameters: Any) -> dict[str, Any]:
        """One /v1/completions call that must succeed."""
        body: dict[str, Any] = {"model": "smollm2", "prompt": prompt, "temperature": 0, **parameters}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, path: str = "/v1/completions", **body: Any) -> Generator[dict[str, Any], None, None]:
        """The events of one streaming call, up to [DONE], which must come."""
        body = {"model": "smollm2", "stream": True, **body}
        with requests.post(self.url + path, json=body, stream=True, timeout=HTTP_TIMEOUT_S) as response:
            assert response.status_code == 200, response.text
            for line in response.iter_lines(chunk_size=1):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
        raise AssertionError("the stream ended without [DONE]")

    def _take_log(self, line: str) -> None:
        with contextlib.suppress(json.JSONDecodeError), self._has_line:
            self._lines.append(json.loads(line))


@contextlib.contextmanager
def running(*flags: str, environ: dict[str, str] | None = None) -> Iterator[System]:
    """A system that is ready, and ends cleanly."""
    system = System(*flags, environ=environ)
    try:
        system.wait_ready()
        yield system
    finally:
        status = system.stop()
    assert status == 0, system.describe()


def wait_until(condition: Any, timeout_s: float, what: str, describe: Any = lambda: "") -> None:
    """Poll until the condition holds.

    Raises:
        AssertionError: After timeout_s, with what was awaited.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}\n{describe()}"
        time.sleep(0.05)


def _pump(stream: Any, take: Any) -> None:
    with stream:
        for line in stream:
            take(line)


def _pids_with(mark: bytes) -> dict[int, str]:
    """Processes that have the mark in their environment, with their commands."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    return found
