"""A Llama model out of a GGUF file: shape from the metadata, tensors under their Hugging Face names."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_worker.errors import UnusableModel
from gpu_worker.loading.gguf_file import GgufFile
from gpu_worker.loading.source import ModelSource
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families import check_architecture, family_named
from gpu_worker.models.rope import RopeConfig

_KNOWN = ("llama",)
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_ROPE_DIVISORS = "rope_freqs.weight"
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def open_gguf(path: Path) -> ModelSource:
    """Open a GGUF file of the Llama architecture.

    Raises:
        OSError: If it cannot be read.
        UnusableModel: If it cannot be served.
    """
    file = GgufFile(path)
    check_architecture(str(file.metadata.get("general.architecture")), _KNOWN)
    config = _config_of(file)
    gguf_names = {**_OUTER, **_layer_names(config.num_layers)}
    hf_names = {gguf: hf for hf, gguf in gguf_names.items()}
    # What has no Hugging Face name keeps its own, so that the check for unexpected tensors names it.
    present = frozenset(hf_names.get(name, name) for name in file.tensors if name != _ROPE_DIVISORS)

    def read(name: str) -> Tensor:
        values = torch.from_numpy(file.read(file.tensors[gguf_names[name]]))
        if name.endswith("q_proj.weight"):
            return _unpermuted(values, config.num_heads)
        if name.endswith("k_proj.weight"):
            return _unpermuted(values, config.num_kv_heads)
        return values

    eos_token_ids = tuple(dict.fromkeys(int(file.metadata[key]) for key in _EOS_KEYS if key in file.metadata))
    return ModelSource(
        family=family_named("LlamaForCausalLM"),
        config=config,
        eos_token_ids=eos_token_ids,
        tensor_names=present,
        read=read,
        is_coded=True,
    )


def _layer_names(num_layers: int) -> dict[str, str]:
    return {
        f"model.layers.{index}.{hf}": f"blk.{index}.{gguf}"
        for index in range(num_layers)
        for hf, gguf in _IN_LAYER.items()
    }


def _config_of(file: GgufFile) -> ModelConfig:
    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"llama.{key}", default)
        if value is None:
            raise UnusableModel(f"the GGUF metadata has no llama.{key}")
        return value

    num_heads = int(get("attention.head_count"))
    hidden_size = int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden_size // num_heads))
    if (rotated := int(get("rope.dimension_count", head_dim))) != head_dim:
        raise UnusableModel(f"rotary embeddings on {rotated} of {head_dim} dimensions are not supported")
    if "token_embd.weight" not in file.tensors:
        raise UnusableModel("the GGUF file has no token_embd.weight")
    return ModelConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=int(get("block_count")),
        num_heads=num_heads,
        num_kv_heads=int(get("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=_rope_of(file, get),
        max_model_len=int(get("context_length")),
        is_tied="output.weight" not in file.tensors,
    )


def _rope_of(file: GgufFile, get: Any) -> RopeConfig:
    theta = float(get("rope.freq_base", 10000.0))
    kind = str(get("rope.scaling.type", "none"))
    divisors: tuple[float, ...] = ()
    if (tensor := file.tensors.get(_ROPE_DIVISORS)) is not None:  # How GGUF keeps Llama 3's scaling.
        divisors = tuple(file.read(tensor).tolist())
    match kind:
        case "none":
            return RopeConfig(theta=theta, divisors=divisors)
        case "linear":
            return RopeConfig(theta=theta, kind="linear", factor=float(get("rope.scaling.factor")), divisors=divisors)
        case _:
            raise UnusableModel(f"rope scaling {kind!r} is not supported; known: none, linear")


def _unpermuted(weight: Tensor, num_heads: int) -> Tensor:
    """Undo what the conversion to GGUF did to each head: it put the pair (i, i + dim / 2) at (2i, 2i + 1)."""
    num_rows, num_columns = weight.shape
    pairs = weight.view(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.transpose(1, 2).reshape(num_rows, num_columns)
