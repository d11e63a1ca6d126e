"""What the runner asks of a device, and the two there are: a CUDA device, and the host in its place.

On the host every operation is done when it returns, so events mark the clock and a graph is the function it was made
from. What can go wrong with a graph is kept: it must be replayed on the very buffers it was captured on.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the order of a device's work."""

    def record(self) -> None:
        """Put the point after all work enqueued so far on the current stream."""

    def wait(self) -> None:
        """Return when the device has got there. Makes the host wait."""

    def ms_since(self, earlier: "Event") -> float:
        """Return the device's time between two points that it has passed."""


class Graph(Protocol):
    """Device work that was recorded once."""

    def replay(self) -> Tensor:
        """Enqueue it on the buffers it was captured on; return its result, which the next replay overwrites."""


class Device(Protocol):
    """Where a model runs. Used by the device thread; events may be waited for in another, after enter_thread there."""

    torch_device: torch.device
    name: str

    def enter_thread(self) -> None:
        """Make it the calling thread's current device. Whoever makes it has done so."""

    def host_buffer(self, num_elements: int) -> Tensor:
        """Return int32 host memory, (num_elements,), that the device can copy to and from while the host goes on."""

    def upload(self, values: Tensor) -> Tensor:
        """Return a copy on the device of a host tensor that is not needed afterwards. Does not wait."""

    def event(self) -> Event:
        """Return a new event that measures time."""

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context whose work starts after what is enqueued by then, and beside what is enqueued later."""

    def capture(self, run: Callable[[], Tensor], buffers: Callable[[], Sequence[Tensor]]) -> Graph:
        """Record run, which has run before and never waits for the device.

        Args:
            run: Enqueues the work and returns its result.
            buffers: Returns the tensors that outlive the graph and that run reads or writes.
        """

    def synchronize(self) -> None:
        """Wait for everything. At start-up only."""

    def free_bytes(self) -> tuple[int, int]:
        """Return the device's memory that nobody has taken, and all of it."""

    def allocated_bytes(self) -> tuple[int, int, int]:
        """Return what this process's tensors take now, took at most since reset_peak, and what it holds for them."""

    def reset_peak(self) -> None:
        """Give unused memory back, and forget the peak."""


class CudaDevice:
    """One CUDA device."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.enter_thread()
        self.name = f"cuda:{index} {torch.cuda.get_device_name(index)}"
        # Torch's own constructor has no types. The default stream of captures is one for all devices of a process.
        self._side = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._capturing = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def enter_thread(self) -> None:
        # A thread begins on device 0: waiting for an event would make a context there, half a GiB of another's memory.
        torch.cuda.set_device(self.torch_device)

    def host_buffer(self, num_elements: int) -> Tensor:
        return torch.zeros(num_elements, dtype=torch.int32, pin_memory=True)

    def upload(self, values: Tensor) -> Tensor:
        # torch's host allocator keeps the pinned copy until the device has read it, and reuses it afterwards.
        return values.pin_memory().to(self.torch_device, non_blocking=True)

    def event(self) -> "CudaEvent":
        return CudaEvent()

    def side_stream(self) -> AbstractContextManager[object]:
        self._side.wait_stream(torch.cuda.current_stream(self.torch_device))
        return torch.cuda.stream(self._side)

    def capture(self, run: Callable[[], Tensor], buffers: Callable[[], Sequence[Tensor]]) -> "CudaGraph":
        graph = torch.cuda.CUDAGraph()
        # One pool for all: they are replayed one after another, so each may use the others' scratch memory.
        # What other threads do meanwhile, such as torch's that watches over collectives, is not the capture's affair.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._capturing, capture_error_mode="thread_local"):
            result = run()
        return CudaGraph(graph, result)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free, total

    def allocated_bytes(self) -> tuple[int, int, int]:
        return (
            torch.cuda.memory_allocated(self.torch_device),
            torch.cuda.max_memory_allocated(self.torch_device),
            torch.cuda.memory_reserved(self.torch_device),
        )

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)


class CudaEvent:
    """A CUDA event with timing. Who waits for it sleeps: a spinning thread would keep the interpreter's lock busy."""

    def __init__(self) -> None:
        # torch's constructor has no types.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def ms_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent), "events of one device"
        return float(earlier._event.elapsed_time(self._event))


class CudaGraph:
    """A CUDA graph and the tensor that it writes its result to."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph = graph
        self._result = result

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._result


class HostDevice:
    """The CPU as a device whose work is done at once."""

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        """memory_bytes: what it says to have, all of it free."""
        self.torch_device = torch.device("cpu")
        self.name = "cpu"
        self._memory_bytes = memory_bytes

    def enter_thread(self) -> None:
        pass

    def host_buffer(self, num_elements: int) -> Tensor:
        return torch.zeros(num_elements, dtype=torch.int32)

    def upload(self, values: Tensor) -> Tensor:
        return values.clone()

    def event(self) -> "HostEvent":
        return HostEvent()

    def side_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def capture(self, run: Callable[[], Tensor], buffers: Callable[[], Sequence[Tensor]]) -> "HostGraph":
        return HostGraph(run, buffers)

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> tuple[int, int]:
        return self._memory_bytes, self._memory_bytes

    def allocated_bytes(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def reset_peak(self) -> None:
        pass


class HostEvent:
    """The time at which it was recorded."""

    def __init__(self) -> None:
        self._recorded_ns = 0

    def record(self) -> None:
        self._recorded_ns = time.monotonic_ns()

    def wait(self) -> None:
        assert self._recorded_ns, "an event that was never recorded never comes"

    def ms_since(self, earlier: Event) -> float:
        assert isinstance(earlier, HostEvent), "events of one device"
        return (self._recorded_ns - earlier._recorded_ns) / 1e6


class HostGraph:
    """The function, and where its buffers were."""

    def __init__(self, run: Callable[[], Tensor], buffers: Callable[[], Sequence[Tensor]]) -> None:
        self._run = run
        self._buffers = buffers
        self._places = self._find()
        run()

    def replay(self) -> Tensor:
        assert self._find() == self._places, "a buffer has moved since the graph was captured"
        return self._run()

    def _find(self) -> list[int]:
        return [buffer.data_ptr() for buffer in self._buffers()]
