"""A running `legato up` of our own, for the length of an experiment: its port, its processes, what they log and use."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0
POLL_S = 0.1
MAX_LOG_LINES = 2000
"""Kept to say what went wrong; an experiment logs more than anybody reads."""

COMMANDS = ("gateway", "tokenizer", "scheduler", "worker")


class SystemBroken(Exception):
    """The system did not start, or died."""


@dataclass(slots=True)
class RunningSystem:
    """Processes by the name of their command, and where each serves what."""

    url: str
    process: "subprocess.Popen[str]"
    lines: list[dict[str, Any]] = field(default_factory=list)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Log lines of that event so far."""
        return [line for line in self.lines if line.get("event") == event]

    def pids(self) -> dict[str, int]:
        """The process of each command; of several, the first."""
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue  # It ended in this moment.
            command = next((word for word in words if word in COMMANDS), None)
            if parent == self.process.pid and command is not None:
                found.setdefault(command, int(entry.name))
        return found

    def metric(self, role: str, name: str) -> dict[str, float]:
        """Every sample of a metric, by its labels (empty for none)."""
        admin = [line["admin"] for line in self.logged("process_started") if line["role"] == role][-1]
        with urllib.request.urlopen(f"{admin}/metrics", timeout=START_TIMEOUT_S) as response:
            text = response.read().decode()
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(name))
        return {key.removeprefix(name): float(value) for key, value in samples}


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> int:
    """Memory that a process holds now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(
    port: int, flags: Sequence[str], environ: dict[str, str], fits: Path, log: Path | None = None
) -> Iterator[RunningSystem]:
    """Start `legato up` with these flags and wait until it is ready; stop it in the end.

    Args:
        port: Of the public API, on loopback.
        flags: Beside the port.
        environ: Options of single processes, as LEGATO_ variables.
        fits: Folder for what the scheduler learns; an experiment should begin from nothing, or from itself.
        log: File for everything that is logged, instead of the latest lines here: reading them would cost this process
            time in which it should measure.

    Raises:
        SystemBroken: If it does not become ready.
    """
    argv = [sys.executable, "-m", "services.launcher.cli", "up", "--port", str(port), *flags]
    environ = {**os.environ, "LEGATO_FITS": str(fits), **environ}
    with open(log, "w") if log is not None else nullcontext(subprocess.PIPE) as stderr:
        process = subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL, stderr=stderr, text=True)
    system = RunningSystem(f"http://127.0.0.1:{port}", process)
    if log is None:
        threading.Thread(target=_keep_log, args=(system,), daemon=True).start()
    try:
        _wait_ready(system)
        yield system
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _keep_log(system: RunningSystem) -> None:
    assert system.process.stderr is not None, "opened as a pipe"
    for line in system.process.stderr:
        # One line per request is of no use here, and there are many.
        if "request_finished" in line or len(system.lines) >= MAX_LOG_LINES:
            continue
        try:
            system.lines.append(json.loads(line))
        except json.JSONDecodeError:
            print(line, end="", file=sys.stderr)


def _wait_ready(system: RunningSystem) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if system.process.poll() is not None:
            raise SystemBroken(f"legato up ended with {system.process.returncode}")
        try:
            with urllib.request.urlopen(f"{system.url}/health/ready", timeout=POLL_S * 20):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise SystemBroken(f"legato up is not ready after {START_TIMEOUT_S:g} s: {system.lines[-5:]}")
