"""Tensors decoded by other threads, a few ahead of the thread that takes them."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

MAX_AHEAD = 4
"""Tensors that are decoded, or being decoded, before anybody has asked for them."""
NUM_THREADS = 2


class ReadAhead:
    """Reads tensors in the order in which they will be asked for."""

    def __init__(self, read: Callable[[str], Tensor], names: Iterable[str]) -> None:
        """read may run in two threads at a time; names are what will be asked for, in order."""
        self._read = read
        self._names = deque(names)
        self._ahead: dict[str, Future[Tensor]] = {}
        # A thread of torch's own for each: more of them would wait for each other.
        self._pool = ThreadPoolExecutor(NUM_THREADS, "read", initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __call__(self, name: str) -> Tensor:
        """Return the tensor.

        Raises:
            OSError, UnusableModel: As read does.
        """
        while self._names and len(self._ahead) < MAX_AHEAD:
            following = self._names.popleft()
            self._ahead[following] = self._pool.submit(self._read, following)
        future = self._ahead.pop(name, None)
        return self._read(name) if future is None else future.result()
