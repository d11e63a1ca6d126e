"""Servers that a list names: started, awaited, weighed and stopped, one at a time."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

STOP_TIMEOUT_S = 40.0
POLL_S = 0.05
BUSY_SAMPLE_S = 2.0
READY_ANSWER_TIMEOUT_S = 5.0


class PeerBroken(Exception):
    """A server did not start, died, or answered with errors; the message names it."""


class ListedPeer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A [[peer]] table."""

    name: str
    command: str
    port: int
    model: str = ""
    ready_s: float = 300.0  # how long it may take to start


class _PeerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer: tuple[ListedPeer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A server, and how it is started."""

    name: str
    argv: tuple[str, ...]
    port: int
    model: str = ""  # empty: the first that /v1/models names
    ready_s: float = 300.0
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def read_peers(path: Path) -> list[Peer]:
    """Return the peers of a TOML file, with variables of the environment put into their commands.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no such list, or two peers have one name.
    """
    try:
        listed = msgspec.convert(tomllib.loads(path.read_text()), _PeerFile).peer
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    names = ["legato", *(peer.name for peer in listed)]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two servers of one name among {', '.join(names)}")
    return [
        Peer(
            name=peer.name,
            argv=tuple(shlex.split(os.path.expandvars(peer.command))),
            port=peer.port,
            model=peer.model,
            ready_s=peer.ready_s,
        )
        for peer in listed
    ]


def legato(tbt_target_ms: float, flags: Sequence[str], fits: str) -> Peer:
    """Return our own system as a peer like any other. What it learns is kept in fits, from round to round."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    argv = [sys.executable, "-m", "services.launcher.cli", "up", "--port", str(port), "--log-level", "warning"]
    argv += ["--tbt-target-ms", str(tbt_target_ms), *flags]
    return Peer(name="legato", argv=tuple(argv), port=port, environ={"LEGATO_FITS": fits})


@contextlib.contextmanager
def running(server: Peer) -> Iterator[tuple["subprocess.Popen[bytes]", float]]:
    """Start a server; yield its process, and the seconds that it took until it answered. Stop it in the end.

    Raises:
        PeerBroken: If it does not start, or if something else answers at its port.
    """
    if _answers(server):
        raise PeerBroken(f"{server.name}: port {server.port} is taken")
    began_s = time.monotonic()
    try:
        process = subprocess.Popen(
            server.argv,
            env={**os.environ, **server.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # So that what it starts can be stopped with it.
        )
    except OSError as error:
        raise PeerBroken(f"{server.name}: {error}") from error
    try:
        while not _answers(server):
            if process.poll() is not None:
                raise PeerBroken(f"{server.name} ended with {process.returncode}: {shlex.join(server.argv)}")
            if time.monotonic() - began_s > server.ready_s:
                raise PeerBroken(f"{server.name} is not ready after {server.ready_s:g} s")
            time.sleep(POLL_S)
        yield process, time.monotonic() - began_s
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _answers(server: Peer) -> bool:
    """Whether it can serve. A server without a readiness check has it when it names a model."""
    for path in ("/health/ready", "/health", "/v1/models"):
        try:
            with urllib.request.urlopen(server.url + path, timeout=READY_ANSWER_TIMEOUT_S):
                return True
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return False
        except OSError:
            return False
    return False


def memory_bytes(pid: int) -> int:
    """Return what a process and all below it hold of the memory, pages that several share counted once."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    family, added = {pid}, True
    while added:
        more = {child for child, parent in parents.items() if parent in family} - family
        family, added = family | more, bool(more)
    total_kib = 0
    for member in family:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total_kib += int(line.split()[1])
    return total_kib * 1024


def busy_cores(sample_s: float = BUSY_SAMPLE_S) -> float:
    """Return how many cores' worth of time the machine spends, sleeping here meanwhile."""
    before, began_s = _busy_ticks(), time.monotonic()
    time.sleep(sample_s)
    ticks = _busy_ticks() - before
    return ticks / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began_s)


def _busy_ticks() -> int:
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return user + nice + system + irq + softirq + steal
