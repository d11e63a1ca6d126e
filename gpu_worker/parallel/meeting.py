"""Where ranks find each other before they can talk: a file on one machine, a server of rank 0's across machines."""

import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from common.wire.names import leaves_loopback
from gpu_worker.parallel.collectives import c10d
from gpu_worker.parallel.directory import make_directory

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LOOPBACK = "127.0.0.1"


class Meeting:
    """Rank 0's side. The others come to url."""

    def __init__(self, rank_address: str, num_ranks: int) -> None:
        """rank_address is where the links between ranks are; num_ranks is how many come, this one included."""
        self._directory: Path | None = None
        if leaves_loopback(rank_address):
            host = address_towards(rank_address)
            store = c10d.TCPStore(host, 0, None, is_master=True, wait_for_workers=False)
            self.store: Store = store
            self.url = f"tcp://{host}:{store.port}"
        else:
            # A directory of this user's alone, so that on one machine nobody listens to the network for it.
            self._directory = make_directory()
            self.url = f"file://{self._directory / 'store'}"
            self.store = join(self.url, num_ranks)

    def close(self) -> None:
        """Tidy up. Ranks that have met need it no more."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def join(url: str, num_ranks: int) -> "Store":
    """Return the store at a Meeting's url."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        file: Store = c10d.FileStore(parts.path, num_ranks)
        return file
    assert parts.hostname is not None, "rank 0 has named a host and a port"
    assert parts.port is not None, "rank 0 has named a host and a port"
    server: Store = c10d.TCPStore(parts.hostname, parts.port, None, is_master=False)
    return server


def address_towards(rank_address: str) -> str:
    """Return the address of this machine by which whoever shares the network of rank_address reaches it."""
    host = urlsplit(rank_address).hostname or LOOPBACK
    if not leaves_loopback(rank_address):
        return LOOPBACK
    # Nothing is sent: connecting a datagram socket only asks the routing table. The port stands for any.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        address: str = probe.getsockname()[0]
    return address
