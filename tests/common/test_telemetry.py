"""Log lines as they reach a file or pipe that several processes write to."""

import os
import socket
import subprocess
import sys

PROGRAM = """
import structlog
from common.telemetry import set_up_logging
set_up_logging("gateway", "gateway-1", "info", "json")
for index in range(3):
    structlog.get_logger().info("something_happened", index=index)
"""


def test_a_line_is_one_write_also_where_python_does_not_buffer() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # Each write arrives by itself.
    with ours, theirs:
        environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=theirs.fileno(), env=environ, check=True, timeout=60)
        ours.settimeout(10)
        lines = [ours.recv(65536) for _ in range(3)]
    assert [b'"index": %d' % index in line for index, line in enumerate(lines)] == [True] * 3
    assert all(line.startswith(b"{") and line.endswith(b"}\n") for line in lines)
