"""Penalties and biases against a plain computation, one token at a time."""

from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.messages.requests import Sampling
from gpu_worker.sampler import Draw, adjust, sample

VOCAB_SIZE = 30
EOS = (3,)


def logits_of(seed: int, num_rows: int = 1) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def draw_of(prompt: list[int], output: list[int], *, seed: int = 0, **sampling: Any) -> Draw:
    token_ids = array("i", prompt + output)
    return Draw(Sampling(**sampling), seed, len(token_ids), len(prompt), token_ids)


def plainly(logits: list[float], prompt: list[int], output: list[int], sampling: Sampling) -> list[float]:
    """The definitions, one token of the vocabulary after another."""
    adjusted = []
    for token, logit in enumerate(logits):
        value = logit
        if token in prompt + output:
            factor = sampling.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= sampling.frequency_penalty * output.count(token)
        value -= sampling.presence_penalty if token in output else 0
        value += dict(sampling.logit_bias).get(token, 0)
        adjusted.append(value)
    return adjusted


tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)
penalised = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100)).map(
            lambda biases: tuple(biases.items())
        ),
    },
)


@settings(max_examples=200, deadline=None)
@given(prompt=tokens.filter(bool), output=tokens, sampling=penalised, seed=st.integers(0, 1000))
def test_logits_are_adjusted_as_the_definitions_say(
    prompt: list[int], output: list[int], sampling: dict[str, Any], seed: int
) -> None:
    logits = logits_of(seed)[0]
    expected = plainly(logits.tolist(), prompt, output, Sampling(**sampling))
    adjust(logits, draw_of(prompt, output, **sampling))
    torch.testing.assert_close(logits, torch.tensor(expected), atol=1e-4, rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    sampling=penalised, temperature=st.sampled_from([0.0, 1.0]), neighbours=st.lists(penalised, max_size=3), seed=tokens
)
def test_a_penalised_draw_depends_on_its_own_tokens_alone(
    sampling: dict[str, Any], temperature: float, neighbours: list[dict[str, Any]], seed: list[int]
) -> None:
    mine = draw_of([1, 2], [5, 5, 7], temperature=temperature, **sampling)
    others = [draw_of([9], seed, temperature=1.0, **other) for other in neighbours]
    logits = logits_of(len(seed), 1 + len(others))
    together = sample(logits.clone(), [*others, mine], EOS)
    assert together[-1] == sample(logits[-1:].clone(), [mine], EOS)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_penalties_come_out_as_they_do_without_penalised_neighbours(dtype: torch.dtype) -> None:
    logits = logits_of(4, 3).to(dtype)
    plain = draw_of([1], [2], temperature=0.0)
    barred = draw_of([1], [2], temperature=0.0, presence_penalty=2.0, logit_bias=((int(logits[1].argmax()), -100.0),))
    assert sample(logits.clone(), [plain, barred, plain], ()).tolist()[::2] == logits.argmax(dim=-1).tolist()[::2]


def test_a_bias_of_100_forces_a_token_and_of_minus_100_bans_it() -> None:
    logits = logits_of(1)[0]
    best, worst = int(logits.argmax()), int(logits.argmin())
    for temperature in (0.0, 1.0):
        forced = draw_of([1], [], temperature=temperature, logit_bias=((worst, 100.0),))
        banned = draw_of([1], [], temperature=temperature, logit_bias=((best, -100.0),))
        assert int(sample(logits.clone().unsqueeze(0), [forced], ())) == worst
        assert int(sample(logits.clone().unsqueeze(0), [banned], ())) != best


def test_a_bias_does_not_bring_an_end_before_min_tokens() -> None:
    logits = logits_of(1)
    forced = draw_of([1], [8], temperature=0.0, min_tokens=2, logit_bias=((EOS[0], 100.0),), repetition_penalty=0.5)
    assert int(sample(logits, [forced], EOS)) != EOS[0]


def test_prompt_tokens_count_for_the_repetition_penalty_alone() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[4] = 1.0
    penalties: tuple[dict[str, Any], ...] = ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0})
    for penalty in penalties:
        assert int(sample(logits.clone().unsqueeze(0), [draw_of([4], [], temperature=0.0, **penalty)], ())) == 4
    adjusted = logits.clone()
    adjust(adjusted, draw_of([4], [], repetition_penalty=2.0))
    assert float(adjusted[4]) == 0.5
