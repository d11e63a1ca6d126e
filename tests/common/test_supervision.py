"""Real processes: a child must not outlive the process of ours that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.messages.links import Role

TIMEOUT_S = 30.0

CHILD = """
import os, signal, sys, time
from common import supervision
from common.messages.links import Role
supervision.follow_supervisor(Role(sys.argv[1]))
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "rank" else signal.SIG_DFL)
print("follows", os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
from common.supervision import supervised_environ
subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, **supervised_environ()})
time.sleep(600)
"""
HANGING = """
import signal, sys, time
from common import supervision
supervision.ORPHAN_STOP_S = 1
supervision.bound_end_of_orphan()
time.sleep(600)
"""


@pytest.mark.parametrize("role", [Role.GATEWAY, Role.RANK])
def test_a_child_ends_with_its_parent_even_if_it_hears_no_signal(role: Role) -> None:
    command = [sys.executable, "-c", PARENT, "-c", CHILD, role]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        follows, pid = parent.stdout.readline().split()
        assert follows == "follows"
        child = int(pid)
        assert is_alive(child)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + TIMEOUT_S
        while is_alive(child):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_child_whose_parent_is_gone_before_it_looks_does_not_start() -> None:
    ended = run(CHILD, "gateway", supervisor=os.getpid() + 1)
    assert (ended.returncode, ended.stdout) == (1, "")


def test_an_orphan_that_hangs_at_its_end_is_ended_by_the_kernel_and_another_is_not() -> None:
    assert run(HANGING, supervisor=os.getpid() + 1).returncode == -signal.SIGALRM
    with pytest.raises(subprocess.TimeoutExpired):
        run(HANGING, supervisor=os.getpid(), timeout_s=3)


def run(code: str, *argv: str, supervisor: int, timeout_s: float = TIMEOUT_S) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "LEGATO_SUPERVISED": str(supervisor)}
    command = [sys.executable, "-c", code, *argv]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended, and that nobody has asked about yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
