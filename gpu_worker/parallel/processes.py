"""The other ranks as processes of this machine, when nobody else starts them. Imports no torch: they start while rank 0
imports it, and all do so at a time."""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import structlog

from common.config import flags_of
from common.supervision import supervised_environ
from gpu_worker.config import WorkerConfig
from gpu_worker.errors import UnusableModel
from gpu_worker.parallel.directory import make_directory
from gpu_worker.parallel.errors import RankLost

log = structlog.get_logger()

STOP_TIMEOUT_S = 5.0
"""How long ranks may take to end in order; then they are killed."""
EXIT_BAD_OPTIONS = 2
"""What a rank returns when it will never run with these options; it has said why."""


class RankProcesses:
    """Ranks 1 to num_ranks - 1, each a child of this process that ends when this one does, however it ends."""

    def __init__(self, config: WorkerConfig) -> None:
        """Start a process for each rank but 0, with this process's options; none if an operator starts them."""
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._directory: Path | None = None
        self.config = config
        """Rank 0's options, with where it binds for the others."""
        if config.rank is not None:
            return
        # A socket in a directory of this user's alone: no port that another process might take first.
        self._directory = make_directory()
        self.config = dataclasses.replace(config, rank=0, rank_address=f"ipc://{self._directory / 'link'}")
        for rank in range(1, config.num_ranks):
            self._children[rank] = subprocess.Popen(
                [sys.executable, "-m", "gpu_worker", *flags_of(config_of(self.config, rank))],
                # Ctrl-C in a terminal reaches this process alone, which then ends the others in order.
                start_new_session=True,
                env={**os.environ, **supervised_environ()},
            )

    async def watch(self) -> None:
        """Wait until one ends.

        Raises:
            RankLost: With its exit status.
            UnusableModel: If it refused to run.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

        def wait(rank: int, child: "subprocess.Popen[bytes]") -> None:
            status = child.wait()
            with contextlib.suppress(RuntimeError):  # The loop is closed: this process is at its end itself.
                loop.call_soon_threadsafe(ended.put_nowait, (rank, status))

        for rank, child in self._children.items():
            log.info("rank_started", rank=rank, pid=child.pid)
            threading.Thread(target=wait, args=(rank, child), name=f"rank-{rank}", daemon=True).start()
        rank, status = await ended.get()  # For ever, where others watch over them.
        if status == EXIT_BAD_OPTIONS:
            raise UnusableModel(f"rank {rank} cannot run with these options; it has said why")
        raise RankLost(rank, f"its process ended with status {status}")

    async def stop(self) -> None:
        """Wait for the ranks, which have been told to end; kill those that do not."""
        await asyncio.to_thread(self._wait_for_all)
        self.close()

    def close(self) -> None:
        """End at once those that still run, and tidy up."""
        for rank, child in self._children.items():
            if child.poll() is None:
                log.warning("rank_killed", rank=rank, pid=child.pid)
                child.kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))


def config_of(first: WorkerConfig, rank: int) -> WorkerConfig:
    """Return the options of a rank that rank 0, whose options are first, starts: on GPUs it has the one that is as far
    from rank 0's as it is itself."""
    device_index = first.device_index + rank if first.device == "cuda" else first.device_index
    return dataclasses.replace(first, rank=rank, admin_port=0, device_index=device_index)
