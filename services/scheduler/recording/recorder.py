"""Writes the recording while the scheduler runs: beside its streams, never in their way."""

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import structlog

from common.clock import NS_PER_S
from common.ids import InstanceId
from services.scheduler.core import SchedulerCore
from services.scheduler.events import Effect, Event
from services.scheduler.limits import Limits
from services.scheduler.recording.files import SegmentFile, prune
from services.scheduler.recording.segment import Head, StepEncoder, encode_head, head_of
from services.scheduler.recording.snapshot import Node, NotSnapshotable, take_snapshot

log = structlog.get_logger()

SEGMENTS = 8
"""Files that share the bound on size; the oldest goes when a new one begins that might exceed it."""
SEGMENT_S = 300.0
"""A segment is followed by another after so long, at the first moment at which no request is open..."""
MAX_SEGMENT_S = 3600.0
"""...or, where there is no such moment, after so long, streams or not."""
LEAST_SEGMENT_S = 1.0
"""However large: a snapshot that exceeds the bound by itself does not make one follow another."""
FLUSH_S = 0.25
"""What is lost when the process is killed: steps of so long. One that ends by itself, even by a bug, loses none."""
MAX_WAITING_STEPS = 4096
"""Steps that may wait for a slow disk: some seconds. Beyond, steps are lost; a new segment begins when it has caught
up."""
RETRY_S = 10.0
"""Pause after a failure before a new segment is tried."""
PRUNE_S = 3600.0
"""Of a scheduler with nothing to record: how often files that have grown too old are looked for."""
SWITCH_S = 0.0005
"""How long the thread may keep the interpreter from the loop, which else is 5 ms: a stall of its own making."""

_Item = tuple[int, Event, tuple[Effect, ...] | None] | tuple[Head, list[Node]]


class Recorder:
    """Takes steps in the scheduler's loop, where each costs next to nothing: all that they hold is immutable. A thread
    encodes, compresses and writes them.

    A disk that is slow, full or read-only costs the recording and is logged; it costs no stream anything.
    """

    def __init__(
        self,
        directory: Path,
        core: SchedulerCore,
        limits: Limits,
        instance_id: InstanceId,
        *,
        max_bytes: int,
        max_age_s: float,
    ) -> None:
        """Nothing is written before begin. max_bytes and max_age_s bound all recordings in the directory."""
        self._directory = directory
        self._core = core
        self._limits = limits
        self._instance_id = instance_id
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        # The loop's.
        self._began_ns: int | None = None  # when the segment began; None while there is none
        self._retry_ns = 0
        self._num_lost = 0
        # Shared: each is written by one side alone, but for the queue.
        self._waiting: deque[_Item] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._has_failed = False  # what waits belongs to no file, until a head comes
        # The thread's.
        self._encoder = StepEncoder()
        self._file: SegmentFile | None = None
        self._segment_bytes = 0
        self._num_dropped = 0
        self._is_idle = True
        sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Steps that are in no file."""
        return self._num_lost + self._num_dropped

    @property
    def is_idle(self) -> bool:
        """Whether all that was taken has been written."""
        return self._is_idle and not self._waiting

    def begin(self, now_ns: int) -> None:
        """Begin a segment with the core's state as it is now."""
        try:
            nodes = take_snapshot(self._core)
        except NotSnapshotable as error:
            log.error("recording_failed", error=str(error))
            self._give_up(now_ns)
            return
        self._began_ns = now_ns
        self._segment_bytes = 0
        self._has_failed = False
        head = head_of(nodes, self._limits, instance_id=self._instance_id, now_ns=now_ns)
        self._waiting.append((head, nodes))
        self._wake.set()

    def record(self, event: Event, effects: tuple[Effect, ...] | None, now_ns: int) -> None:
        """Take a step that the core has made; effects None: it raised instead."""
        if self._began_ns is not None and (self._has_failed or len(self._waiting) > MAX_WAITING_STEPS):
            log.warning("recording_interrupted", num_waiting=len(self._waiting))
            self._give_up(now_ns)
        if self._began_ns is None:
            self._num_lost += 1
        else:
            self._waiting.append((now_ns, event, effects))
            if not self._wake.is_set():
                self._wake.set()
        if effects is not None and self._is_due(now_ns):
            self.begin(now_ns)

    def close(self) -> None:
        """Write what there is, and end."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()

    def _is_due(self, now_ns: int) -> bool:
        if self._began_ns is None:
            return now_ns >= self._retry_ns and self.is_idle
        age_s = (now_ns - self._began_ns) / NS_PER_S
        return (
            (age_s > LEAST_SEGMENT_S and self._segment_bytes > self._max_bytes // SEGMENTS)
            or (age_s > SEGMENT_S and self._core.num_open == 0)
            or age_s > MAX_SEGMENT_S
        )

    def _give_up(self, now_ns: int) -> None:
        """Record nothing more for a while; what is in files already stays whole."""
        self._began_ns = None
        self._retry_ns = now_ns + int(RETRY_S * NS_PER_S)

    # --- in the thread

    def _run(self) -> None:
        while not self._is_closing or self._waiting:
            is_woken = self._wake.wait(PRUNE_S)
            if not self._is_closing:
                time.sleep(FLUSH_S)  # So that one frame holds the steps of many iterations.
            self._wake.clear()
            self._is_idle = False
            taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
            try:
                if not is_woken:
                    self._prune(keep=None if self._file is None else self._file.path)
                for is_head, values in self._frames(taken):
                    self._write(is_head, values)
            except (OSError, NotSnapshotable) as error:
                log.warning("recording_failed", directory=str(self._directory), error=str(error))
                self._close_file()
                self._has_failed = True
            self._is_idle = True
        self._close_file()

    def _frames(self, taken: list[_Item]) -> Iterator[tuple[bool, bytes]]:
        """What one write takes: a whole head, or all steps up to the next; each with whether it begins a segment."""
        steps: list[bytes] = []
        for item in taken:
            if len(item) == 3:
                steps.append(self._encoder.step(*item))
                continue
            if steps:
                yield False, b"".join(steps)
                steps = []
            self._encoder = StepEncoder()
            yield True, b"".join(encode_head(*item))
        if steps:
            yield False, b"".join(steps)

    def _write(self, is_head: bool, values: bytes) -> None:
        if is_head:
            self._close_file()
            self._prune(keep=None)
            self._file = SegmentFile(self._directory, self._instance_id)
        if self._file is None:
            self._num_dropped += 1
        else:
            self._segment_bytes += self._file.write(values)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _prune(self, *, keep: Path | None) -> None:
        most = self._max_bytes * (SEGMENTS - 1) // SEGMENTS
        prune(self._directory, max_bytes=most, max_age_s=self._max_age_s, keep=keep)
