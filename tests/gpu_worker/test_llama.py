"""The model against Hugging Face transformers, on the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.gpu_worker.hf import hf_greedy, hf_logits, tiny_llama
from tests.gpu_worker.world import BACKEND_NAMES, World, load, prompt

FLOAT32_TOLERANCE = 1e-4
"""Of logits that reach about 10: both sides round to 24 bits, some hundred times in a row."""
BFLOAT16_TOLERANCE = 0.02
"""Relative to the logits' length: each of some 30 roundings to 8 bits is off by up to 0.4%, in random directions.
Transformers' own bfloat16 differs from its float32 by 0.008 to 0.010 on these models."""


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 4])
def test_float32_logits_and_greedy_tokens_equal_transformers(
    tmp_path: Path, groups: int, is_tied: bool, backend: str
) -> None:
    model = tiny_llama(tmp_path, groups=groups, is_tied=is_tied)
    world = World(load(tmp_path), backend=backend)
    for length in (1, 2, 33):
        name, tokens = str(length), prompt(length)
        world.add(name, tokens, room=12)
        sampled = world.prefill(name, chunk_len=length)
        torch.testing.assert_close(
            world.logits[name], hf_logits(model, tokens)[-1], atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE
        )
        assert [sampled, *world.generate([name], 11)[name]] == hf_greedy(model, tokens, 12)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("groups", [1, 3, 4])
def test_bfloat16_logits_are_within_the_stated_tolerance_of_float32(tmp_path: Path, groups: int, backend: str) -> None:
    tiny_llama(tmp_path, groups=groups, dtype=torch.bfloat16, initializer_range=0.1)
    model: Any = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    world = World(load(tmp_path, torch.bfloat16), backend=backend)
    tokens = prompt(40)
    world.add("a", tokens)
    world.prefill("a", chunk_len=40)
    expected = hf_logits(model, tokens)[-1]
    assert world.runner.kv_cache.keys[0].dtype == torch.bfloat16
    assert (world.logits["a"].float() - expected).norm() / expected.norm() < BFLOAT16_TOLERANCE


LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3], ids=["linear", "llama3"])
def test_rope_scaling_equals_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    model = tiny_llama(tmp_path, groups=3, rope_parameters=rope)
    tokens = prompt(120)
    world = World(load(tmp_path))
    world.add("a", tokens)
    world.prefill("a", chunk_len=120)
    torch.testing.assert_close(
        world.logits["a"], hf_logits(model, tokens)[-1], atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE
    )
