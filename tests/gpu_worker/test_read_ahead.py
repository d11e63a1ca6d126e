"""Tensors that other threads decode ahead of the one that takes them."""

import threading
import time

import pytest
import torch
from torch import Tensor

from gpu_worker.loading.read_ahead import MAX_AHEAD, NUM_THREADS, ReadAhead

NAMES = [f"tensor {index}" for index in range(20)]


def test_each_is_what_it_would_be_and_few_are_read_before_they_are_asked_for() -> None:
    num_read = 0
    running = 0
    most_running = 0
    lock = threading.Lock()

    def read(name: str) -> Tensor:
        nonlocal num_read, running, most_running
        with lock:
            num_read += 1
            running += 1
            most_running = max(most_running, running)
        time.sleep(0.005)
        with lock:
            running -= 1
        return torch.tensor([NAMES.index(name)])

    with ReadAhead(read, NAMES) as ahead:
        for index, name in enumerate(NAMES):
            assert int(ahead(name)) == index
            if index % 5 == 0:
                wanted, deadline = min(index + MAX_AHEAD, len(NAMES)), time.monotonic() + 30
                while num_read < wanted and time.monotonic() < deadline:
                    time.sleep(0.005)
                time.sleep(0.1)  # Long enough to read more of them.
                assert num_read == wanted
    assert num_read == len(NAMES)
    assert most_running == NUM_THREADS


def test_one_that_was_not_foreseen_is_read_when_it_is_asked_for() -> None:
    with ReadAhead(lambda name: torch.tensor([len(name)]), ["aa"]) as ahead:
        assert int(ahead("bbb")) == 3
        assert int(ahead("aa")) == 2


def test_an_error_is_raised_where_its_tensor_is_asked_for() -> None:
    def read(name: str) -> Tensor:
        if name == "b":
            raise OSError("b is damaged")
        return torch.zeros(1)

    with ReadAhead(read, ["a", "b", "c"]) as ahead:
        assert int(ahead("a")) == 0
        with pytest.raises(OSError, match="b is damaged"):
            ahead("b")
