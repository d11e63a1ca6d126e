"""What a W3C traceparent says, as far as hops that write no span of it need to know."""


def is_sampled(traceparent: str) -> bool:
    """Whether spans below this trace context are to be written: the last bit of its flags. A character is looked at,
    since it is asked of every stream that is late."""
    return traceparent[-1:] in ("1", "3", "5", "7", "9", "b", "d", "f")
