"""The real model against transformers: the same dequantised weights, read by different code."""

import pytest
import torch

from gpu_worker.loading import LoadedModel
from tests.gpu_worker.hf import hf_greedy, hf_logits, hf_smollm2, smollm2_or_skip
from tests.gpu_worker.world import World, load, prompt

FLOAT32_TOLERANCE = 2e-3
"""Of logits that reach 30: 30 layers deep, and torch sums in another order where matrices are fused."""
BFLOAT16_TOLERANCE = 0.05
"""Relative to the logits' length: some 300 roundings to 8 bits."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(smollm2_or_skip())


def test_float32_logits_and_greedy_tokens_equal_transformers_alone_and_side_by_side(model: LoadedModel) -> None:
    world = World(model, block_size=16, num_blocks=64)
    prompts = {name: prompt(length, vocab_size=49152) for name, length in (("1", 1), ("20", 20), ("150", 150))}
    for name, tokens in prompts.items():
        world.add(name, tokens, room=8)
    first = world.iterate({name: len(tokens) for name, tokens in prompts.items()})
    for name, tokens in prompts.items():
        expected = hf_logits(hf_smollm2(), tokens)[-1]
        torch.testing.assert_close(world.logits[name], expected, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)
    rest = world.generate(prompts, 5)
    for name, tokens in prompts.items():
        assert [first[name], *rest[name]] == hf_greedy(hf_smollm2(), tokens, 6)


def test_bfloat16_logits_are_within_the_stated_tolerance() -> None:
    world = World(load(smollm2_or_skip(), torch.bfloat16), block_size=16, num_blocks=8)
    tokens = prompt(30, vocab_size=49152)
    world.add("a", tokens)
    world.prefill("a", chunk_len=30)
    expected = hf_logits(hf_smollm2(), tokens)[-1]
    assert (world.logits["a"].float() - expected).norm() / expected.norm() < BFLOAT16_TOLERANCE


def test_the_model_ends_a_turn_with_the_files_own_end_id(model: LoadedModel) -> None:
    assert model.eos_token_ids == (2,)
    assert (model.config.vocab_size, model.max_model_len) == (49152, 8192)
