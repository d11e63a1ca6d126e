"""A directory of one rank 0's own, where the ranks of one machine meet. Imports no torch."""

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

_PREFIX = "legato-ranks-"
_NAME = re.compile(rf"{_PREFIX}(\d+)-\w+")


def make_directory() -> Path:
    """Return a new directory that this user alone can enter; remove those of processes that were killed before they
    could."""
    folder = Path(tempfile.gettempdir())
    for old in folder.glob(f"{_PREFIX}*"):
        named = _NAME.fullmatch(old.name)
        with contextlib.suppress(OSError):  # Another has removed it, or it is another's.
            if named is not None and old.stat().st_uid == os.getuid() and not _is_running(int(named[1])):
                shutil.rmtree(old)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # Sends nothing.
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
