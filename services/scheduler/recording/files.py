"""The folder of recordings: a ring of files, bounded in size and age."""

import itertools
import os
import time
from pathlib import Path

from common.ids import InstanceId
from services.scheduler.recording.segment import MAGIC, SUFFIX, FrameWriter

_numbers = itertools.count()


class SegmentFile:
    """One segment being written. It holds token ids, so only its owner may read it."""

    def __init__(self, directory: Path, instance_id: InstanceId) -> None:
        """
        Raises:
            OSError: If it cannot be made.
        """
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.path = directory / f"{began}-{instance_id}-{next(_numbers):04d}{SUFFIX}"
        self._frames = FrameWriter()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._write_all(MAGIC)

    def write(self, values: bytes) -> int:
        """Append values; return the bytes that they took.

        Raises:
            OSError: If the disk does not take them.
        """
        frame = self._frames.frame(values)
        self._write_all(frame)
        return len(frame)

    def close(self) -> None:
        os.close(self._file)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]


def prune(directory: Path, *, max_bytes: int, max_age_s: float, keep: Path | None = None) -> None:
    """Delete recordings that are too old, then the oldest ones until the rest takes at most max_bytes.

    Raises:
        OSError: If the folder cannot be read, or a file not deleted.
    """
    if not directory.is_dir():
        return
    found = []
    for path in directory.glob(f"*{SUFFIX}"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # Another scheduler with the same folder was faster.
        if path != keep:
            found.append((status.st_mtime, status.st_size, path))
    total = 0
    for modified_s, size, path in sorted(found, reverse=True):
        total += size
        if total > max_bytes or time.time() - modified_s > max_age_s:
            path.unlink(missing_ok=True)


def segments_of(path: Path) -> list[Path]:
    """The recordings that a file or a folder holds, oldest first.

    Raises:
        FileNotFoundError: If there is none.
    """
    if path.is_file():
        return [path]
    found = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []
    if not found:
        raise FileNotFoundError(f"{path} is no recording and no folder with recordings")
    return found
