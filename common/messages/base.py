"""What every message is: a frozen struct that carries its own type name."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One message on a link.

    Travels as a map from field names to values. Fields that a receiver does not know (of a newer minor version)
    are ignored; a new field has a default, so that an older sender may leave it out.
    """


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Part of a message that is sent once per token or chunk, so it travels as a bare array.

    New fields go to the end and have defaults; receivers ignore trailing values that they do not know.
    """
