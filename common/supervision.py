"""No process outlives the one of ours that started it: what a parent tells its children, and what they do with it."""

import ctypes
import os
import signal
import sys

from common.messages.links import Role

ORPHAN_STOP_S = 30
"""How long a process may take to end once it is asked to, where nobody is left to kill it."""
_SUPERVISOR = "LEGATO_SUPERVISED"


def supervised_environ() -> dict[str, str]:
    """What a child of this process finds in its environment, beside the rest, so that it ends when this one does."""
    return {_SUPERVISOR: str(os.getpid())}


def follow_supervisor(role: Role) -> None:
    """If a process of ours started this one, have the kernel end it when that one dies, however it dies.

    Raises:
        SystemExit: If it is dead already.
    """
    if _SUPERVISOR not in os.environ or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    # A device, or another rank, may keep a worker from noticing a signal; and it has nothing to finish for anybody.
    signum = signal.SIGKILL if role in (Role.WORKER, Role.RANK) else signal.SIGTERM
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signum))
    if _is_orphan():  # It died before the kernel was asked.
        raise SystemExit(1)


def bound_end_of_orphan() -> None:
    """Call when this process is asked to stop: if nobody is left to kill it, the kernel will in ORPHAN_STOP_S."""
    if _is_orphan():
        signal.alarm(ORPHAN_STOP_S)  # Without a handler, so whatever the process waits for.


def _is_orphan() -> bool:
    """Whether the process of ours that started this one is gone."""
    supervisor = os.environ.get(_SUPERVISOR)
    return supervisor is not None and os.getppid() != int(supervisor)
