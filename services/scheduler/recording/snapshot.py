"""A core's whole state as plain values, and back: exact, in the middle of a run, without pickle.

The state is a graph: a worker knows its requests, which know their placement, which knows its worker. It becomes a
table of nodes that name each other by index. Whatever the core keeps is taken along, field by field, so that a new
field needs nothing here; a class that is not of the core's own modules (code.MODULES) is refused, both ways. So a file
can make nothing but the core's own state, and runs no code of its own.
"""

import dataclasses
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any

import msgspec

from common.cost.devices import Device
from common.cost.roofline import Roofline
from common.cost.shapes import ModelShape
from services.scheduler.core import SchedulerCore
from services.scheduler.policy import POLICIES
from services.scheduler.policy.batch import Policy
from services.scheduler.recording.code import classes

_PLAIN = frozenset({NoneType, bool, int, float, str, bytes})
"""Types that stand for themselves."""
_SEQUENCES: dict[str, type] = {"list": list, "deque": deque, "tuple": tuple, "frozenset": frozenset, "set": set}
_MAPPINGS: dict[str, type] = {"dict": dict, "odict": OrderedDict}
_KIND_OF = {kind: name for name, kind in (_SEQUENCES | _MAPPINGS).items()}
SLICE = 4096
"""Items of a long sequence that one node holds: so encoding a node never takes long, and others get their turn."""

Node = list[Any]
"""[kind, *contents]. A plain value in contents is itself; anything else is a list of one index: that of its node."""


class NotSnapshotable(Exception):
    """The core holds something that no file can bring back, or a file names something that the core does not hold."""


def take_snapshot(core: SchedulerCore) -> list[Node]:
    """Return the state as nodes; the core's own is the first. They share nothing with the core that can change.

    Made to be quick, since streams wait meanwhile: a long sequence is copied as a whole and known by its first item,
    and what never changes is left as it is, for encode_nodes to look at.

    Raises:
        NotSnapshotable: If something in it is of no class of the core's modules.
    """
    return _Writer().write(core)


def encode_nodes(nodes: Iterable[Node]) -> Iterator[bytes]:
    """Each node as MessagePack; decoded, they are what restore takes.

    Raises:
        NotSnapshotable: If a long sequence is not of plain values all through, or a frozen value holds something else.
    """
    for node in nodes:
        if node[0] in _LONG and not _PLAIN.issuperset(map(type, node[-1])):
            raise NotSnapshotable(f"a long {node[0]} of plain values and others")
        try:
            yield _encoder.encode(node)
        except (TypeError, RecursionError) as error:
            raise NotSnapshotable(str(error)) from error


def restore(nodes: Sequence[Node]) -> SchedulerCore:
    """Return the core whose state was taken.

    Raises:
        NotSnapshotable: If the nodes are of another code, or no snapshot at all.
    """
    try:
        core = _Reader(nodes).read()
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, msgspec.ValidationError) as error:
        raise NotSnapshotable(f"this code has no such state: {error!r}") from error
    if not isinstance(core, SchedulerCore):
        raise NotSnapshotable(f"its first node is {type(core).__name__}, not a core")
    return core


_LONG = ("long", "more")
_encoder = msgspec.msgpack.Encoder()


class _Writer:
    def __init__(self) -> None:
        self._index_of: dict[int, int] = {}
        self._values: list[Any] = []  # in order of index; also keeps them alive, so that ids stay theirs
        self._fields: dict[type, _Fields] = {}

    def write(self, root: object) -> list[Node]:
        self._ref(root)
        nodes: list[Node] = []
        slices: list[Node] = []
        for value in self._values:  # Grows meanwhile.
            nodes.append(self._node(value, len(nodes), slices))
        return nodes + slices

    def _ref(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        index = self._index_of.get(id(value))
        if index is None:
            index = self._index_of[id(value)] = len(self._values)
            self._values.append(value)
        return [index]

    def _refs(self, values: Iterable[Any]) -> list[Any]:
        copied = list(values)
        if _PLAIN.issuperset(map(type, copied)):
            return copied
        return [value if type(value) in _PLAIN else self._ref(value) for value in copied]

    def _node(self, value: Any, index: int, slices: list[Node]) -> Node:
        kind = type(value)
        if (fields := self._fields.get(kind)) is not None:
            return ["object", fields.name, fields.names, self._refs(fields.get(value))]
        name = _KIND_OF.get(kind)
        if (
            name in ("list", "deque")
            and getattr(value, "maxlen", None) is None
            and len(value) > SLICE
            and type(value[0]) in _PLAIN
        ):
            copied = list(value)
            slices += [["more", index, copied[start : start + SLICE]] for start in range(SLICE, len(copied), SLICE)]
            return ["long", name, copied[:SLICE]]
        if kind is deque and value.maxlen is not None:
            return ["bounded", self._refs(value), value.maxlen]
        if name in _SEQUENCES:
            return [name, self._refs(value)]
        if name in _MAPPINGS:
            return [name, self._refs(value), self._refs(value.values())]
        if kind is array:
            return ["array", value.typecode, value.tobytes()]
        class_name = _names().get(kind)
        if class_name is None:
            raise NotSnapshotable(f"{kind.__module__}.{kind.__qualname__} is no class of the core's modules")
        if kind is Policy:
            return ["policy", value.name]
        if kind is Roofline:  # Its figures and caches follow from what it was made of.
            return ["roofline", value.shape, value.device, value.tensor_parallel]
        if kind in _frozen():
            return ["frozen", class_name, value]
        fields = self._fields[kind] = _Fields(class_name, _field_names(value))
        return ["object", fields.name, fields.names, self._refs(fields.get(value))]


class _Fields:
    """How the objects of one class are taken apart."""

    def __init__(self, name: str, names: list[str]) -> None:
        self.name = name
        self.names = names
        self._getter = attrgetter(*names)

    def get(self, value: object) -> tuple[Any, ...]:
        found = self._getter(value)
        return (found,) if len(self.names) == 1 else tuple(found)


class _Reader:
    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._made: dict[int, Any] = {}

    def read(self) -> Any:
        # What can change is made empty first: every cycle goes through such a value.
        for index, (kind, *contents) in enumerate(self._nodes):
            if kind == "long":
                self._made[index] = _SEQUENCES[contents[0]](contents[1])
            elif kind == "more":
                self._made[contents[0]].extend(contents[1])
            elif kind == "bounded":
                self._made[index] = deque(maxlen=contents[1])
            elif kind in ("list", "deque", "set"):
                self._made[index] = _SEQUENCES[kind]()
            elif kind in _MAPPINGS:
                self._made[index] = _MAPPINGS[kind]()
            elif kind == "object":
                made = classes()[contents[0]]
                if made in _frozen():
                    raise ValueError(f"{contents[0]} is made whole or not at all")
                self._made[index] = object.__new__(made)
        for index, node in enumerate(self._nodes):
            if index in self._made:
                self._fill(self._made[index], node)
        return self._made[0]

    def _value(self, ref: Any) -> Any:
        if type(ref) is not list:
            return ref
        (index,) = ref
        if index not in self._made:
            self._made[index] = self._whole(self._nodes[index])
        return self._made[index]

    def _values(self, refs: Iterable[Any]) -> list[Any]:
        return [self._value(ref) if type(ref) is list else ref for ref in refs]

    def _whole(self, node: Node) -> Any:
        """A value that never changes, from contents that are there or are such values themselves."""
        match node:
            case ["tuple" | "frozenset" as kind, items]:
                return _SEQUENCES[kind](self._values(items))
            case ["array", typecode, data]:
                return array(typecode, data)
            case ["policy", name]:
                return POLICIES[name]
            case ["roofline", shape, device, tensor_parallel]:
                return Roofline(
                    msgspec.convert(shape, ModelShape), msgspec.convert(device, Device), int(tensor_parallel)
                )
            case ["frozen", name, value]:
                return msgspec.convert(value, classes()[name])
        raise ValueError(f"a node of kind {node[:1]}")

    def _fill(self, value: Any, node: Node) -> None:
        match node:
            case ["list" | "deque", items] | ["bounded", items, _]:
                value.extend(self._values(items))
            case ["set", items]:
                value.update(self._values(items))
            case ["dict" | "odict", keys, values]:
                value.update(zip(self._values(keys), self._values(values), strict=True))
            case ["object", _, names, refs]:
                for name, content in zip(names, self._values(refs), strict=True):
                    setattr(value, name, content)


def _field_names(value: Any) -> list[str]:
    """All that makes up an object that can change, whatever its make."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(vars(value))


@cache
def _frozen() -> frozenset[type]:
    """Classes whose instances, and all that they hold, never change: messages, events, effects, settings."""
    return frozenset(
        kind
        for kind in classes().values()
        if issubclass(kind, tuple | msgspec.Struct | Enum)
        or (dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
    )


@cache
def _names() -> dict[type, str]:
    return {kind: name for name, kind in classes().items()}
