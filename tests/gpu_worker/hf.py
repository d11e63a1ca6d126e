"""Models of Hugging Face transformers, to be compared with. Nothing here uses our own loaders."""

import inspect
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from gguf.constants import GGUFValueType
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging

from common.models import ModelNotFound, find_model

logging.disable_progress_bar()  # type: ignore[no-untyped-call]

TINY_VOCAB_SIZE = 199
TINY_HEAD_DIM = 16


def tiny_llama(
    path: Path,
    *,
    groups: int = 1,
    is_tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **config: Any,
) -> LlamaForCausalLM:
    """Save a random Llama model to path, and return it.

    Args:
        path: A directory, made if need be.
        groups: Query heads per key-value head.
        is_tied: Whether the head is the embedding.
        dtype: Of the files and of the returned model.
        seed: Of the weights.
        max_shard_size: Less than the model makes several files and an index.
        config: More of transformers' LlamaConfig.
    """
    num_kv_heads = {1: 3, 3: 2, 4: 1}[groups]
    torch.manual_seed(seed)
    settings = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": num_kv_heads * groups,
        "num_key_value_heads": num_kv_heads,
        "head_dim": TINY_HEAD_DIM,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": is_tied,
        # Wide enough that the best two candidates are hardly ever tied.
        "initializer_range": 0.3,
        "eos_token_id": [5, 7],
        "bos_token_id": 1,
        **config,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # Ones, from their initialiser: would hide a norm that is left out.
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model = model.to(dtype).eval()
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return cast(LlamaForCausalLM, model)


FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "mistral": (MistralConfig, {"sliding_window": 16}),
    "qwen2": (Qwen2Config, {}),
    "qwen2 with windows": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {}),
    "gemma3": (
        Gemma3TextConfig,
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi3": (Phi3Config, {"sliding_window": 24, "pad_token_id": 0}),
    "phi3 without a window": (Phi3Config, {"sliding_window": None, "pad_token_id": 0}),
}
"""Families other than Llama, each with what a tiny model of it needs of its own."""


def tiny_of(
    family: str,
    path: Path,
    *,
    groups: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    spread: float = 0.3,
    **config: Any,
) -> Any:
    """Save a random model of one of FAMILIES to path, and return it.

    Args:
        family: One of FAMILIES.
        path: A directory, made if need be.
        groups: Query heads per key-value head.
        head_dim: Of each head.
        dtype: Of the files and of the returned model.
        spread: Of the weights, as tiny_llama's initializer_range; wider models have it smaller by the same sums.
        config: More of transformers' configuration.
    """
    config_type, special = FAMILIES[family]
    num_heads = groups * (2 if groups < 4 else 1)
    # Phi-3 derives the head size from these two.
    hidden_size = num_heads * head_dim if config_type is Phi3Config else 48
    torch.manual_seed(groups)
    settings = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // groups,
        "head_dim": head_dim,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
        "initializer_range": spread * (48 / hidden_size) ** 0.5,
        "eos_token_id": 5,
        "bos_token_id": 1,
        **special,
        **config,
    }
    from_config: Any = AutoModelForCausalLM.from_config
    model = from_config(config_type(**settings))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # Ones, or zeros where 1 is added, would hide a norm that is left out.
            low, high = (-0.5, 0.5) if config_type is Gemma3TextConfig else (0.5, 1.5)
            torch.nn.init.uniform_(parameter, low, high)
        elif name.endswith("bias"):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    model = model.to(dtype).eval()
    model.save_pretrained(path)
    return model


def smollm2_or_skip() -> Path:
    """Return SmolLM2's GGUF file; skip the test where it has not been pulled."""
    try:
        path = find_model("smollm2").gguf
    except ModelNotFound as error:
        pytest.skip(str(error))
    assert path is not None
    return path


@cache
def hf_smollm2() -> LlamaForCausalLM:
    """Return SmolLM2 as a transformers model in float32, its weights read out of the GGUF file by the gguf package.

    Takes some seconds the first time.
    """
    reader = _TensorReader(smollm2_or_skip())

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    config: Any = LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    tensors = {
        tensor.name: torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        for tensor in reader.tensors
    }
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb.__init__(config)  # Its frequencies are a buffer, and now unset.
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    for index in range(config.num_hidden_layers):
        here, there = f"model.layers.{index}.", f"blk.{index}."
        state[f"{here}input_layernorm.weight"] = tensors[f"{there}attn_norm.weight"]
        state[f"{here}post_attention_layernorm.weight"] = tensors[f"{there}ffn_norm.weight"]
        for projection, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            coded = tensors[f"{there}attn_{projection}.weight"]
            state[f"{here}self_attn.{projection}_proj.weight"] = coded[half_split_rows(len(coded), heads)]
        state[f"{here}self_attn.v_proj.weight"] = tensors[f"{there}attn_v.weight"]
        state[f"{here}self_attn.o_proj.weight"] = tensors[f"{there}attn_output.weight"]
        for projection in ("gate", "up", "down"):
            state[f"{here}mlp.{projection}_proj.weight"] = tensors[f"{there}ffn_{projection}.weight"]
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return cast(LlamaForCausalLM, model.float().eval())


def half_split_rows(num_rows: int, num_heads: int) -> Tensor:
    """Return, for each row of a query or key matrix as Hugging Face has it, the row of the GGUF tensor that it is.

    GGUF interleaves the two halves of each head: its rows 2 i and 2 i + 1 are rows i and i + head_dim / 2.
    """
    head_dim = num_rows // num_heads
    rows = []
    for head in range(num_heads):
        for half in (0, 1):
            rows += [head * head_dim + 2 * pair + half for pair in range(head_dim // 2)]
    return torch.tensor(rows)


@torch.no_grad()
def hf_logits(model: Any, token_ids: list[int]) -> Tensor:
    """Return the logits after each token: (tokens, vocab)."""
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@torch.no_grad()
def hf_greedy(model: Any, token_ids: list[int], num_tokens: int) -> list[int]:
    """Return the next num_tokens tokens by greedy decoding. End-of-sequence ids do not stop it."""
    # Renamed in version 5; the old name warns there.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    output: list[int] = []
    kv_cache, fresh = None, token_ids
    for _ in range(num_tokens):
        step = model(torch.tensor([fresh]), **{argument: kv_cache}, use_cache=True)
        kv_cache, fresh = step.past_key_values, [int(step.logits[0, -1].argmax())]
        output += fresh
    return output


class _TensorReader(GGUFReader):
    """The gguf package's reader, less the 100,000 strings of the tokenizer, over which it takes 5 s."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY and self._get(orig_offs, np.uint32)[0] == GGUFValueType.STRING:
            end = orig_offs + 12
            for _ in range(int(self._get(orig_offs + 4, np.uint64)[0])):
                end += 8 + int.from_bytes(self.data[end : end + 8].tobytes(), "little")
            return end - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType.STRING]
        return super()._get_field_parts(orig_offs, raw_type)
