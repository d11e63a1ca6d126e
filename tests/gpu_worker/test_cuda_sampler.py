"""Drawing for a whole batch at once gives what drawing row by row gives."""

import random

import pytest
import torch

from common.messages.requests import Sampling
from gpu_worker.check.sampling import draw_on
from gpu_worker.cuda.device import HostDevice
from gpu_worker.sampler import Draw, gumbel, noise, noise_keys, sample
from tests.gpu_worker.device_world import NoWaits

VOCAB_SIZE = 300


def drawn_together(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    with NoWaits():
        tokens = draw_on(HostDevice(), logits, draws)
    return tokens.tolist()


KINDS = {
    "plain": [Sampling()],
    "greedy": [Sampling(temperature=0.0), Sampling(top_k=1)],
    "top_k": [Sampling(top_k=2), Sampling(top_k=40, temperature=3.0), Sampling(top_k=VOCAB_SIZE + 5)],
    "top_p": [Sampling(top_p=0.3), Sampling(top_p=0.95, temperature=2.0), Sampling(top_p=1e-6)],
    "min_p": [Sampling(min_p=0.05), Sampling(min_p=1.0)],
    "all": [Sampling(top_k=20, top_p=0.8, min_p=0.02, temperature=1.5)],
}


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_a_batch_draws_what_its_rows_draw_alone(kind: str) -> None:
    generator = random.Random(kind)
    samplings = KINDS.get(kind) or [sampling for each in KINDS.values() for sampling in each]
    draws = [
        Draw(generator.choice(samplings), generator.randrange(-(2**63), 2**63), generator.randrange(5000), 1)
        for _ in range(200)
    ]
    logits = torch.randn(len(draws), VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    assert drawn_together(logits.clone(), draws) == sample(logits.clone(), draws, ()).tolist()


def test_candidates_as_likely_as_the_last_one_kept_are_kept_too() -> None:
    logits = torch.zeros(400, 8)
    logits[:, 6:] = -50.0
    draws = [Draw(Sampling(top_k=2), seed, 0, 1) for seed in range(400)]
    together = drawn_together(logits, draws)
    assert together == sample(logits.clone(), draws, ()).tolist()
    assert set(together) == {0, 1, 2, 3, 4, 5}


def test_noise_of_many_rows_is_the_noise_of_each() -> None:
    seeds, positions = [0, -1, 2**63 - 1, -(2**63), 12345], [0, 1, 4000, 2**31, 7]
    token_ids = torch.arange(100)
    together = gumbel(noise_keys(torch.tensor(seeds), torch.tensor(positions)).unsqueeze(1), token_ids.unsqueeze(0))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert torch.equal(together[row], noise(seed, position, token_ids))
