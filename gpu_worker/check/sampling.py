"""Does the device draw the tokens that a CPU draws?"""

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from common.messages.requests import Sampling
from gpu_worker.cuda.device import Device
from gpu_worker.cuda.sampler import Parameters, draw, needs_of
from gpu_worker.sampler import LEAST_TEMPERATURE, Draw, sample

LEAST_AGREEMENT = 0.95
"""Of the draws. Logarithms differ in their last bits between devices, so two candidates that are as good as tied may
come out differently; another rule would make nearly all differ."""
VOCAB_SIZE = 32000
KINDS = (
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(top_k=40),
    Sampling(top_p=0.9, temperature=1.5),
    Sampling(min_p=0.05),
    Sampling(top_k=100, top_p=0.8, min_p=0.01, temperature=0.7),
)


def check_sampling(device: Device, num_rows: int) -> float:
    """Return the share of rows for which device and CPU draw the same token."""
    generator = Random(1)
    draws = [
        Draw(KINDS[row % len(KINDS)], generator.randrange(-(2**63), 2**63), generator.randrange(8192), 1)
        for row in range(num_rows)
    ]
    logits = 3 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    drawn = draw_on(device, device.upload(logits), draws).to("cpu")
    return float((drawn == sample(logits, draws, ())).float().mean())


def draw_on(device: Device, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return a token for each row of logits, (rows, vocab), which are on the device. Does not wait."""
    samplings = [each.sampling for each in draws]
    raced = [each.sampling for each in draws if not each.is_greedy]
    parameters = Parameters(
        is_greedy=device.upload(torch.tensor([each.is_greedy for each in draws])),
        seeds=device.upload(torch.tensor([each.seed for each in draws])),
        positions=device.upload(torch.tensor([each.position for each in draws])),
        temperatures=device.upload(torch.tensor([max(each.temperature, LEAST_TEMPERATURE) for each in samplings])),
        top_ks=device.upload(torch.tensor([each.top_k for each in samplings])),
        top_ps=device.upload(torch.tensor([each.top_p for each in samplings])),
        min_ps=device.upload(torch.tensor([each.min_p for each in samplings])),
    )
    return draw(logits, parameters, needs_of(raced))
