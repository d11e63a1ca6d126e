"""What can go wrong between text and tokens."""


class UnusableTokenizer(OSError):
    """The model's files hold no tokenizer or template that can be used; the message says why. Found at start-up."""


class EncodeError(Exception):
    """A client's prompt cannot become tokens; the message says why, and goes to the client."""
