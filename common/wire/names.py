"""The addresses of links: which hold a name, what a name stands for now, and which leave this machine."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

LookUp = Callable[[str, int], Awaitable[str]]
"""From a host name and a port to the address to dial. Raises OSError or UnicodeError if there is none now."""


def name_in(address: str) -> tuple[str, int] | None:
    """Return the host name and port that must be looked up before the address can be dialled; None if it stands for
    itself: an IP address, a path, localhost, or no address at all."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:  # A port that is no number.
        return None
    if parts.scheme != "tcp" or host is None or port is None or host == "localhost":
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host, port
    return None


def leaves_loopback(address: str) -> bool:
    """Whether a link to or at this address can be reached from, or reaches, another machine.

    A name counts as leaving, whatever it resolves to, except localhost.
    """
    parts = urlsplit(address)
    if parts.scheme in ("ipc", "inproc"):
        return False
    host = parts.hostname or "*"
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


async def look_up(host: str, port: int) -> str:
    """Return the first address of a name, to dial."""
    return (await look_up_all(host, port))[0]


async def look_up_all(host: str, port: int) -> list[str]:
    """Return every address of a name, to dial. IPv4 only, which is all that our sockets speak.

    Raises:
        OSError: If there is none now.
        UnicodeError: If it cannot be a host name at all.
    """
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    return [f"tcp://{entry[4][0]}:{port}" for entry in entries]
