"""Drawn tokens on their way from the last stage's devices to the first stage's, whose next rows may need them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.cuda.buffers import SlotState
from gpu_worker.cuda.device import Device
from gpu_worker.parallel.group import Group
from gpu_worker.slots import Resident, Row


@dataclass(frozen=True, slots=True)
class _Expected:
    """The tokens of one iteration."""

    token_ids: Tensor  # (samples,) int32 on the device, written when wait has returned
    wait: Callable[[], None]
    places: tuple[tuple[Resident, int], ...]  # of each token: its request, and its position there


class Returns:
    """On the first of several stages; elsewhere nothing is expected. Used by one thread."""

    def __init__(self, state: SlotState, group: Group, device: Device) -> None:
        self._state = state
        self._group = group
        self._device = device
        self._expected: deque[_Expected] = deque()

    def expect(self, rows: Sequence[Row]) -> None:
        """This stage is through with these rows, for each of which the last one will draw a token, in this order."""
        token_ids = torch.zeros(len(rows), dtype=torch.int32, device=self._device.torch_device)
        places = tuple((row.resident, row.start + row.num_tokens) for row in rows)
        self._expected.append(_Expected(token_ids, self._group.receive_back(token_ids), places))

    def take_for(self, rows: Sequence[Row]) -> None:
        """Have the tokens that these rows begin with in their slots before what is enqueued next.

        No more iterations stay out than there are stages: with so many under way the first one has to wait anyway.
        """
        needed = {id(row.resident) for row in rows}
        last = max(
            (
                index
                for index, expected in enumerate(self._expected)
                if any(id(resident) in needed for resident, _ in expected.places)
            ),
            default=-1,
        )
        for _ in range(max(last + 1, len(self._expected) - self._group.layout.pp + 1)):
            self._take()

    def take_all(self) -> None:
        """As take_for, of whatever comes back."""
        while self._expected:
            self._take()

    def _take(self) -> None:
        expected = self._expected.popleft()
        expected.wait()
        # Its slot may have gone to another request meanwhile.
        kept = [index for index, (resident, _) in enumerate(expected.places) if self._state.holds(resident)]
        if not kept:
            return
        slots = [expected.places[index][0].slot for index in kept]
        positions = [expected.places[index][1] for index in kept]
        uploaded = self._device.upload(torch.tensor([kept, slots, positions], dtype=torch.int64))
        self._state.tokens[uploaded[1], uploaded[2]] = expected.token_ids[uploaded[0]]
