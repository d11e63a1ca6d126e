"""Bytes of messages, both ways. The only module that calls msgpack."""

import msgpack
import msgspec

from common.messages import AnyMessage

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Larger than any message of ours: a 128k-token prompt is 512 KiB. A peer that sends more is cut off."""

_MAX_ITEMS = 1 << 20
"""Bound on the length of one array or map: ids of long lists travel as bytes, so real ones stay far below."""


class MalformedMessage(Exception):
    """A peer sent bytes that are no message of this protocol."""


def encode(message: AnyMessage) -> bytes:
    """Return the message as MessagePack bytes."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    return packed


def decode(data: bytes) -> AnyMessage:
    """Return the message that data holds, with every field checked against its type.

    Raises:
        MalformedMessage: If data is not MessagePack within the bounds, not of the union, or a field has a wrong type.
    """
    try:
        plain = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_MESSAGE_BYTES,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
            max_ext_len=0,
        )
    # msgpack raises ValueError and its subclasses for all of: truncated, trailing, too large, too deep, not UTF-8.
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not MessagePack: {error!r}") from error
    try:
        message: AnyMessage = msgspec.convert(plain, AnyMessage, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise MalformedMessage(str(error)) from error
    return message
