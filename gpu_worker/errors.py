"""What ends a worker's start with a message instead of a traceback."""


class UnusableModel(OSError):
    """The model's files cannot be served; the message says what is wrong with them."""


class BackendUnavailable(OSError):
    """The attention back end that was asked for cannot run here; the message says why and what can."""
