"""Free ports of the loopback interface, for those who have to name one before somebody listens there."""

import secrets
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
FIRST_PORT = 10_000
"""Below are those of well-known servers."""
MIN_CHOICE = 1_000
"""Fewer ports than this are no choice."""
MAX_TRIES = 1_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_FIRST_EPHEMERAL = 32_768


def free_ports(count: int) -> list[int]:
    """Return ports on which nobody listens now.

    The kernel gives them to nobody by itself: until somebody listens there, and again while that process is restarted,
    a port from the kernel's own range could go to any other process that binds or connects without a wish.
    """
    # All are held until the last is found, so that none comes twice.
    listeners = [_listen() for _ in range(count)]
    ports: list[int] = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _listen() -> socket.socket:
    num_choices = _first_ephemeral() - FIRST_PORT
    if num_choices >= MIN_CHOICE:
        for _ in range(MAX_TRIES):
            try:
                return socket.create_server((LOOPBACK, FIRST_PORT + secrets.randbelow(num_choices)))
            except OSError:
                continue  # Taken.
    return socket.create_server((LOOPBACK, 0))


def _first_ephemeral() -> int:
    """The first port that the kernel gives to those who do not care which."""
    try:
        return int(EPHEMERAL_RANGE.read_text().split()[0])
    except OSError:
        return DEFAULT_FIRST_EPHEMERAL
