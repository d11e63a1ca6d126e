"""Where a test's processes listen, when others have to know that before they do."""

from common.ports import LOOPBACK, free_ports


def free_port() -> int:
    """A port of the loopback interface that nobody has, and that nobody gets by chance until it is taken."""
    (port,) = free_ports(1)
    return port


def free_address() -> str:
    """The same as the address of a link."""
    return f"tcp://{LOOPBACK}:{free_port()}"
