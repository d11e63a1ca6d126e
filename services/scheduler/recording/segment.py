"""One file of a recording: a head with the core's state, then each event and what the core answered.

A file is MAGIC, then frames: length and CRC-32 of what follows (each 4 bytes, little-endian), then bytes of one zlib
stream that goes through the whole file, flushed at each frame's end. The stream is a sequence of MessagePack values,
each behind its length in 4 bytes: a Head, its nodes, then Steps. A process that dies in the middle of a frame leaves a
torn one, which no reader counts: all before it is whole.
"""

import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import msgspec

from common.ids import RequestId, TokenizerId, WorkerId
from common.messages.streams import StreamBatch, TokensSampled
from services.scheduler.core import SchedulerCore
from services.scheduler.events import Decode, Effect, Event, RunIteration, SendStreams
from services.scheduler.limits import Limits
from services.scheduler.recording.code import code_version
from services.scheduler.recording.snapshot import Node, NotSnapshotable, encode_nodes, restore

MAGIC = b"legato recording 2\n"
SUFFIX = ".legato"
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A length above it is no frame of ours. A snapshot of a hundred thousand blocks takes a tenth of it."""

_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")

EVENTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}
EFFECTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Effect)}
SAME_DECODES = "RunIteration with the decodes of the last"
SAMPLED_COLUMNS = "SendStreams with sampled as columns"
SAMPLED_TYPE = tuple[TokensSampled, ...]

_PLAN_FIELDS = tuple(field.name for field in fields(RunIteration) if field.name != "decodes")
_plan_values = attrgetter(*_PLAN_FIELDS)


class BadRecording(Exception):
    """The file is no recording, or one that this code cannot read."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment begins with."""

    code: str  # code.code_version of the process that wrote it
    instance_id: str  # of that process
    wall_s: float  # Unix time when it began
    now_ns: int  # the same moment by the core's clock
    limits: Limits
    num_nodes: int  # of the snapshot: so many values follow


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One event, and the core's answer; effects is None where the core raised instead."""

    now_ns: int
    kind: str  # key of EVENTS
    event: msgspec.Raw
    effects: msgspec.Raw  # as StepEncoder writes them


_encoder = msgspec.msgpack.Encoder()


class StepEncoder:
    """Steps of one segment to bytes, in order. Equal steps after equal steps are equal bytes.

    What a steady batch repeats is left out: a plan's streams where its worker's plan before had the same, and the ids
    of tokens where the batch before had them for the same requests. Tokens go as columns, and a column whose values are
    all equal as one of them.
    """

    def __init__(self) -> None:
        self._decodes: dict[WorkerId, tuple[Decode, ...]] = {}
        self._sampled: dict[TokenizerId, tuple[RequestId, ...]] = {}

    def step(self, now_ns: int, event: Event, effects: tuple[Effect, ...] | None) -> bytes:
        """One step, with its length before it."""
        data = _encoder.encode((now_ns, type(event).__name__, event, self._answer(effects)))
        return _LENGTH.pack(len(data)) + data

    def effects(self, effects: tuple[Effect, ...] | None) -> bytes:
        """The effects of one step, as they stand in it."""
        return _encoder.encode(self._answer(effects))

    def _answer(self, effects: tuple[Effect, ...] | None) -> list[tuple[str, object]] | None:
        if effects is None:
            return None
        return [self._effect(effect) for effect in effects]

    def _effect(self, effect: Effect) -> tuple[str, object]:
        if type(effect) is RunIteration:
            return self._plan(effect)
        if type(effect) is SendStreams and effect.batch.sampled:
            return self._streams(effect)
        return type(effect).__name__, effect

    def _plan(self, plan: RunIteration) -> tuple[str, object]:
        if self._decodes.get(plan.worker_id) == plan.decodes:
            return SAME_DECODES, _plan_values(plan)
        self._decodes[plan.worker_id] = plan.decodes
        return RunIteration.__name__, plan

    def _streams(self, sent: SendStreams) -> tuple[str, object]:
        request_ids, *columns = zip(*map(msgspec.structs.astuple, sent.batch.sampled), strict=True)
        if self._sampled.get(sent.tokenizer_id) == request_ids:
            request_ids = ()
        else:
            self._sampled[sent.tokenizer_id] = request_ids
        columns = [column[:1] if column.count(column[0]) == len(column) else column for column in columns]
        batch = msgspec.structs.replace(sent.batch, sampled=())
        return SAMPLED_COLUMNS, (sent.tokenizer_id, batch, request_ids, columns)


class StepDecoder:
    """What StepEncoder wrote, back; steps of one segment, in order."""

    def __init__(self) -> None:
        self._decodes: dict[WorkerId, tuple[Decode, ...]] = {}
        self._sampled: dict[TokenizerId, list[RequestId]] = {}

    def effects(self, step: Step) -> list[Effect]:
        """The step's effects; none where the core raised.

        Raises:
            BadRecording: If this code knows no such effect.
        """
        try:
            found: Sequence[tuple[str, Any]] = msgspec.msgpack.decode(step.effects) or ()
            return [self._effect(name, value) for name, value in found]
        except (KeyError, msgspec.ValidationError) as error:
            raise BadRecording(f"no effects of this code: {error!r}") from error

    def _effect(self, name: str, value: Any) -> Effect:
        if name == SAME_DECODES:
            plan = msgspec.convert(dict(zip(_PLAN_FIELDS, value, strict=True)), RunIteration)
            return replace(plan, decodes=self._decodes[plan.worker_id])
        if name == SAMPLED_COLUMNS:
            return self._streams(*value)
        effect: Effect = msgspec.convert(value, EFFECTS[name])
        if isinstance(effect, RunIteration):
            self._decodes[effect.worker_id] = effect.decodes
        return effect

    def _streams(
        self, tokenizer_id: TokenizerId, rest: Any, request_ids: list[RequestId], columns: list[list[Any]]
    ) -> SendStreams:
        request_ids = self._sampled[tokenizer_id] = request_ids or self._sampled[tokenizer_id]
        whole = [column * len(request_ids) if len(column) == 1 else column for column in columns]
        sampled = msgspec.convert(list(zip(request_ids, *whole, strict=True)), SAMPLED_TYPE)
        batch = msgspec.structs.replace(msgspec.convert(rest, StreamBatch), sampled=sampled)
        return SendStreams(tokenizer_id=tokenizer_id, batch=batch)


def head_of(nodes: Sequence[Node], limits: Limits, *, instance_id: str, now_ns: int) -> Head:
    """The head of a segment that begins now."""
    return Head(
        code=code_version(),
        instance_id=instance_id,
        wall_s=time.time(),
        now_ns=now_ns,
        limits=limits,
        num_nodes=len(nodes),
    )


def encode_head(head: Head, nodes: Sequence[Node]) -> Iterator[bytes]:
    """The beginning of a segment, value by value, each with its length before it.

    Raises:
        NotSnapshotable: If the nodes hold what no file can.
    """
    for data in (_encoder.encode(head), *encode_nodes(nodes)):
        yield _LENGTH.pack(len(data)) + data


class FrameWriter:
    """Bytes of values to bytes of frames."""

    def __init__(self) -> None:
        # The fastest level: request ids come again and again, so even it leaves a twentieth.
        self._zlib = zlib.compressobj(1)

    def frame(self, values: bytes) -> bytes:
        """Everything so far can be read back as soon as these bytes are in the file."""
        data = self._zlib.compress(values) + self._zlib.flush(zlib.Z_SYNC_FLUSH)
        return _FRAME.pack(len(data), zlib.crc32(data)) + data


class Segment:
    """A file to read. Iterating gives its steps, from memory that does not grow with the file."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            BadRecording: If the file is none of ours, or its head is torn.
            OSError: If it cannot be read.
        """
        self.path = path
        self.is_torn = False  # once all steps are read: whether the file ends in the middle of a frame
        self._values = self._read()
        try:
            self.head = msgspec.msgpack.decode(next(self._values), type=Head)
            self.nodes: list[Node] = [msgspec.msgpack.decode(next(self._values)) for _ in range(self.head.num_nodes)]
        except (StopIteration, msgspec.DecodeError) as error:
            raise BadRecording(f"{path}: its head is torn or none of ours") from error

    def core(self) -> SchedulerCore:
        """The core as it was when the segment began.

        Raises:
            BadRecording: If this code has no such state.
        """
        try:
            return restore(self.nodes)
        except NotSnapshotable as error:
            raise BadRecording(f"{self.path}: {error}; {self.head.code} wrote it, this is {code_version()}") from error

    def steps(self) -> Iterator[Step]:
        """The steps, once.

        Raises:
            BadRecording: If a value is no step.
        """
        decoder = msgspec.msgpack.Decoder(Step)
        for value in self._values:
            try:
                yield decoder.decode(value)
            except msgspec.DecodeError as error:
                raise BadRecording(f"{self.path}: {error}") from error

    def _read(self) -> Iterator[bytes]:
        """The values of all whole frames."""
        inflate = zlib.decompressobj()
        held = b""
        with self.path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise BadRecording(f"{self.path} is no recording of this format")
            while (data := self._frame(file.read(_FRAME.size), file)) is not None:
                held += inflate.decompress(data)
                at = 0
                while len(held) - at >= _LENGTH.size:
                    (length,) = _LENGTH.unpack_from(held, at)
                    end = at + _LENGTH.size + length
                    if end > len(held):
                        break
                    yield held[at + _LENGTH.size : end]
                    at = end
                held = held[at:]

    def _frame(self, head: bytes, file: Any) -> bytes | None:
        """The next frame's data; None at the file's end, or where a frame is torn."""
        if not head:
            return None
        if len(head) == _FRAME.size:
            length, checksum = _FRAME.unpack(head)
            data: bytes = file.read(min(length, MAX_FRAME_BYTES + 1))
            if len(data) == length and zlib.crc32(data) == checksum:
                return data
        self.is_torn = True
        return None


def event_of(step: Step) -> Event:
    """The step's event.

    Raises:
        BadRecording: If this code knows no such event.
    """
    try:
        event: Event = msgspec.msgpack.decode(step.event, type=EVENTS[step.kind])
    except (KeyError, msgspec.DecodeError) as error:
        raise BadRecording(f"no event of this code: {step.kind}: {error}") from error
    return event
