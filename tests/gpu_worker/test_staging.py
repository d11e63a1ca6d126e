"""Weights through two pinned buffers."""

from pathlib import Path

import torch

from common.models import find_model
from gpu_worker.cuda.device import HostDevice, HostEvent
from gpu_worker.cuda.staging import Staging
from gpu_worker.loading import load_model, open_model
from tests.gpu_worker.hf import tiny_llama


class NotedDevice(HostDevice):
    """Remembers, event by event, what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self._num_events = 0

    def event(self) -> HostEvent:
        device, name = self, "ab"[self._num_events]
        self._num_events += 1

        class NotedEvent(HostEvent):
            def record(self) -> None:
                device.asked.append(f"{name} is read")
                super().record()

            def wait(self) -> None:
                device.asked.append(f"wait for {name}")
                super().wait()

        return NotedEvent()


def test_a_tensor_comes_over_in_pieces_and_in_the_targets_dtype() -> None:
    source = torch.randn(37, 5, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.zeros(50, 5, dtype=dtype)
        Staging(HostDevice(), buffer_bytes=64).copy(whole[3:40], source.T.contiguous().T)
        assert torch.equal(whole[3:40], source.to(dtype))
        assert not whole[:3].any()
        assert not whole[40:].any()


def test_a_buffer_is_filled_again_only_when_the_device_has_read_it() -> None:
    device = NotedDevice()
    staging = Staging(device, buffer_bytes=64)
    target = torch.zeros(80)
    staging.copy(target[:48], torch.ones(48))  # 16 elements a piece
    staging.copy(target[48:], torch.ones(32))
    later = ["wait for a", "a is read", "wait for b", "b is read", "wait for a", "a is read"]
    assert device.asked == ["a is read", "b is read", *later]
    assert target.all()


def test_a_model_that_is_staged_is_the_model(tmp_path: Path) -> None:
    tiny_llama(tmp_path, groups=3)
    source = open_model(find_model(str(tmp_path)))
    plain = load_model(source, torch.bfloat16).weights
    staged = load_model(source, torch.bfloat16, copy=Staging(HostDevice(), buffer_bytes=1024).copy).weights
    assert torch.equal(staged.head, plain.head)
    for mine, theirs in zip(staged.layers, plain.layers, strict=True):
        assert torch.equal(mine.query_key_value, theirs.query_key_value)
        assert torch.equal(mine.down, theirs.down)
        assert torch.equal(mine.mlp_norm, theirs.mlp_norm)
