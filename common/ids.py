"""Identifiers, one type each, so that a block cannot pass for a request; and token ids as bytes."""

import secrets
import sys
from array import array
from collections.abc import Iterable
from typing import NewType

RequestId = NewType("RequestId", str)
"""One completion: one prompt, one choice. Named by the gateway, unique for ever."""
InstanceId = NewType("InstanceId", str)
"""One run of one process. A restarted process has a new one, so a known peer with a new id lost its state."""
WorkerId = NewType("WorkerId", InstanceId)
TokenizerId = NewType("TokenizerId", InstanceId)
Slot = NewType("Slot", int)
"""A request's small number on one worker, from its placement until its blocks are released."""
BlockId = NewType("BlockId", int)
"""A KV block of one worker."""


def new_instance_id(role: str) -> InstanceId:
    """Return a fresh id that starts with the role, for logs: `worker-1f0c93ab52e8`."""
    return InstanceId(f"{role}-{secrets.token_hex(6)}")


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return ids as little-endian int32 bytes, the form in which long id lists travel.

    A prompt of 128k tokens converts in microseconds this way; as a list of integers it would hold up the
    receiver's event loop for milliseconds, which is a stall for every stream that waits behind it.

    Raises:
        OverflowError: If an id does not fit 32 bits.
    """
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> "array[int]":
    """Return the ids that pack_ids packed.

    Raises:
        ValueError: If data is not a whole number of ids.
    """
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
