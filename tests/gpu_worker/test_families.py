"""Every family against Hugging Face transformers, on the same random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.models import find_model
from gpu_worker.attention import choose_backend
from gpu_worker.errors import BackendUnavailable, UnusableModel
from gpu_worker.loading import LoadedModel, load_model, open_model
from tests.gpu_worker.hf import FAMILIES, hf_greedy, hf_logits, tiny_of
from tests.gpu_worker.world import KERNELS, World, load, prompt

FLOAT32_TOLERANCE = 3e-4
"""Of logits that reach about 30: both sides round to 24 bits, some hundred times in a row."""
BFLOAT16_TOLERANCE = 0.03
"""Relative to the logits' length: each of some 40 roundings to 8 bits is off by up to 0.4%, in random directions."""
SHAPES = [(1, 64), (3, 128), (4, 64), (8, 128)]  # query heads for each key-value head, and head size
LIKE_LLAMA = {"mistral", "phi3", "phi3 without a window"}


# The reference is slow, and compared with the others by test_attention: one shape is enough to show that it is called
# with what a family needs.
CASES = [
    (family, backend, shape)
    for family in FAMILIES
    for backend in ("cpu", "reference", *(("native",) if KERNELS and family in LIKE_LLAMA else ()))
    for shape in (SHAPES[1:2] if backend == "reference" else SHAPES)
]


def poison(world: World) -> None:
    """Fill blocks that nobody owns with NaN."""
    for pool in (*world.runner.kv_cache.keys, *world.runner.kv_cache.values):
        pool[world.free_blocks] = float("nan")


class Compared:
    """A world and transformers side by side: whatever samples is compared."""

    def __init__(self, model: LoadedModel, theirs: Any, backend: str) -> None:
        self.world, self._theirs = World(model, backend=backend, block_size=4), theirs
        self.tokens: dict[str, list[int]] = {}
        self.num_compared = 0

    def add(self, name: str, length: int) -> None:
        self.tokens[name] = prompt(length, seed=7)
        self.world.add(name, self.tokens[name], room=12)

    def iterate(self, **num_tokens: int) -> None:
        for name, token in self.world.iterate(num_tokens).items():
            expected = hf_logits(self._theirs, self.tokens[name])[-1].float()
            self.compare(self.world.logits[name].float(), expected)
            self.tokens[name].append(token)
            self.num_compared += 1

    def compare(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(logits, expected, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


class ComparedLoosely(Compared):
    def compare(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        assert (logits - expected).norm() / expected.norm() < BFLOAT16_TOLERANCE


def run_hybrid_batches(compared: Compared) -> None:
    """Prompts in chunks beside decodes, whole prompts beside both, contexts on both sides of the windows."""
    for name, length in {"long": 61, "middle": 33, "short": 3, "one": 1}.items():
        compared.add(name, length)
    poison(compared.world)
    compared.iterate(short=3, long=30)
    compared.iterate(short=1, one=1, long=7)
    compared.iterate(short=1, one=1, middle=33, long=24)
    for _ in range(8):
        compared.iterate(short=1, one=1, middle=1, long=1)
    assert compared.num_compared == 39


@pytest.mark.parametrize(("family", "backend", "shape"), CASES)
def test_float32_logits_in_hybrid_batches_equal_transformers(
    tmp_path: Path, family: str, backend: str, shape: tuple[int, int]
) -> None:
    theirs = tiny_of(family, tmp_path, groups=shape[0], head_dim=shape[1])
    run_hybrid_batches(Compared(load(tmp_path), theirs, backend))


@pytest.mark.parametrize(
    ("family", "backend"), [(family, backend) for family, backend, shape in CASES if shape == SHAPES[2]]
)
def test_bfloat16_logits_are_within_the_stated_tolerance_of_float32(tmp_path: Path, family: str, backend: str) -> None:
    tiny_of(family, tmp_path, dtype=torch.bfloat16, spread=0.1)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    run_hybrid_batches(ComparedLoosely(load(tmp_path, torch.bfloat16), theirs, backend))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_chunked_prompts_equal_transformers(tmp_path: Path, family: str) -> None:
    theirs = tiny_of(family, tmp_path)
    model = load(tmp_path)
    for chunk_len in (5, 64):
        world = World(model)
        world.add("a", prompt(50), room=24)
        poison(world)
        first = world.prefill("a", chunk_len)
        assert [first, *world.generate(["a"], 23)["a"]] == hf_greedy(theirs, prompt(50), 24)


@pytest.mark.skipif(KERNELS is None, reason="the kernels could not be built here")
def test_with_windows_too_the_kernels_logits_depend_on_neither_neighbours_nor_chunks_to_the_bit(tmp_path: Path) -> None:
    tiny_of("mistral", tmp_path)
    model = load(tmp_path)
    alone = World(model, backend="native")
    alone.add("a", prompt(61))
    alone.prefill("a", 61)
    for chunk_len in (1, 7, 40):
        world = World(model, backend="native", seed=chunk_len)
        for name, length in (("a", 61), ("b", 80), ("c", 5)):
            world.add(name, prompt(length), room=80)
        while left := world.num_left("a"):
            world.iterate(
                {name: min(chunk_len, world.num_left(name)) for name in ("b", "c")} | {"a": min(chunk_len, left)}
            )
            if "a" in world.logits:
                break
        assert torch.equal(world.logits["a"], alone.logits["a"])


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.01 * index for index in range(32)],
    "long_factor": [1.5 + 0.1 * index for index in range(32)],
}


@pytest.mark.parametrize(("served_len", "length"), [(64, 60), (256, 100)], ids=["short factors", "long factors"])
def test_longrope_equals_transformers(tmp_path: Path, served_len: int, length: int) -> None:
    theirs = tiny_of(
        "phi3 without a window",
        tmp_path,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={**LONGROPE, "original_max_position_embeddings": 64},
    )
    model = load_model(open_model(find_model(str(tmp_path))), torch.float32, served_len)
    compared = Compared(model, theirs, "cpu")
    compared.add("a", length)
    compared.iterate(a=length)
    assert compared.num_compared == 1


def test_heads_rotated_in_part_equal_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    theirs = tiny_of("phi3 without a window", tmp_path, rope_parameters=rope)
    run_hybrid_batches(Compared(load(tmp_path), theirs, "cpu"))


def test_gemmas_global_layers_may_have_scaled_frequencies_in_newer_and_in_older_files(tmp_path: Path) -> None:
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3_000.0},
    }
    theirs = tiny_of("gemma3", tmp_path, rope_parameters=both)
    run_hybrid_batches(Compared(load(tmp_path), theirs, "cpu"))
    newer = load(tmp_path).config
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"], config["layer_types"]
    config |= {
        "rope_theta": 50_000.0,
        "rope_local_base_freq": 3_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }
    file.write_text(json.dumps(config))
    assert load(tmp_path).config == newer


def test_a_window_that_no_request_outgrows_is_none(tmp_path: Path) -> None:
    theirs = tiny_of("mistral", tmp_path, sliding_window=128)
    source = open_model(find_model(str(tmp_path)))
    model = load_model(source, torch.float32, 128)
    assert model.config.windows == ()
    run_hybrid_batches(Compared(model, theirs, "cpu"))
    assert load_model(source, torch.float32, 129).config.windows == (128,) * 3


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - LIKE_LLAMA))
def test_kernels_made_for_llama_refuse_what_is_unlike_it_and_auto_goes_on_to_torch(tmp_path: Path, family: str) -> None:
    tiny_of(family, tmp_path)
    model = load(tmp_path)
    spec = World(model).spec
    with pytest.raises(BackendUnavailable, match="'native' is unavailable: native: its program is made for Llama"):
        choose_backend("native", spec)
    assert choose_backend("auto", spec).name == "cpu"


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ("qwen3", {"attention_bias": True}, "attention_bias is not supported for Qwen3ForCausalLM"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_act 'silu' is not supported; known: gelu_pytorch_tanh"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention' is not supported"),
        ("mistral", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("phi3", {"rope_parameters": {**LONGROPE, "short_factor": [1.0]}}, "longrope has 1 factors for 32"),
        ("phi3", {"architectures": ["Phi4MMForCausalLM"]}, "known: LlamaForCausalLM, MistralForCausalLM, Qwen2"),
    ],
)
def test_what_a_family_does_not_do_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], problem: str
) -> None:
    tiny_of(family, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(UnusableModel, match=problem):
        load_model(open_model(find_model(str(tmp_path))), torch.float32, 64)


def test_a_family_lacks_none_of_its_tensors(tmp_path: Path) -> None:
    tiny_of("qwen2", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(UnusableModel, match=r"missing: .*k_norm\.weight.*unexpected: .*k_proj\.bias"):
        load(tmp_path)
