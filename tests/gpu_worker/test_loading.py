"""Model files: both formats give the same model, and what cannot be served is refused by name."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from common.models import find_model
from gpu_worker.errors import UnusableModel
from gpu_worker.loading import load_model, open_model
from gpu_worker.models.decoder import ModelWeights
from tests.gpu_worker.hf import TINY_VOCAB_SIZE, half_split_rows, tiny_llama
from tests.gpu_worker.world import load

_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def all_tensors(weights: ModelWeights) -> dict[str, torch.Tensor]:
    tensors = {name: getattr(weights, name) for name in ("embedding", "final_norm", "head", "cosine", "sine")}
    for index, layer in enumerate(weights.layers):
        for name in layer.__slots__:
            if (tensor := getattr(layer, name)) is not None:
                tensors[f"{index}.{name}"] = tensor
    return tensors


def gguf_name(name: str) -> str:
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in outer:
        return f"{outer[stem]}.weight"
    _, _, index, inner = stem.split(".", 3)
    return f"blk.{index}.{_GGUF_NAMES[inner]}.weight"


def write_gguf(
    path: Path, model: LlamaForCausalLM, kind: gguf.GGMLQuantizationType, *, is_tied: bool = False, **metadata: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Write the model as a conversion to GGUF does; return the values that its matrices then have, by HF name."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"token {index}" for index in range(5000)])  # longer than what is kept of an array
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(7)
    for key, value in metadata.items():
        if key == "rope_scaling_type":
            writer.add_rope_scaling_type(value)
        elif key == "rope_scaling_factor":
            writer.add_rope_scaling_factor(value)
    stored = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and is_tied:
            continue
        values = parameter.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        order = None if heads is None else half_split_rows(len(values), heads)
        if order is not None:
            permuted = np.empty_like(values)
            permuted[order.numpy()] = values
            values = permuted
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            coded = gguf.quantize(values, kind)
            writer.add_tensor(gguf_name(name), coded, raw_dtype=kind)
            values = gguf.dequantize(coded, kind)
        stored[name] = values if order is None else values[order.numpy()]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_gguf_and_safetensors_of_the_same_values_load_to_the_same_model(
    tmp_path: Path, kind: str, is_tied: bool
) -> None:
    # Rows are whole blocks of 32, which quantised kinds need; GGUF keeps the epsilon as float32.
    model = tiny_llama(
        tmp_path / "hf", groups=4, is_tied=is_tied, hidden_size=64, intermediate_size=96, rms_norm_eps=2.0**-20
    )
    stored = write_gguf(tmp_path / "model.gguf", model, getattr(gguf.GGMLQuantizationType, kind), is_tied=is_tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(stored[name]))
    model.save_pretrained(tmp_path / "hf")
    from_directory, from_gguf = load(tmp_path / "hf"), load(tmp_path / "model.gguf")
    assert from_gguf.eos_token_ids == from_directory.eos_token_ids == (5, 7)
    assert from_gguf.config == from_directory.config
    expected = all_tensors(from_directory.weights)
    for name, tensor in all_tensors(from_gguf.weights).items():
        assert torch.equal(tensor, expected[name]), name
    assert (from_gguf.weights.head is from_gguf.weights.embedding) is is_tied


def test_several_files_with_an_index_load_as_one_does(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "one")
    tiny_llama(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = all_tensors(load(tmp_path / "one").weights), all_tensors(load(tmp_path / "many").weights)
    for name, tensor in one.items():
        assert torch.equal(tensor, many[name]), name


def test_a_file_that_the_index_names_and_nobody_has_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path, max_shard_size="50KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UnusableModel, match=gone.name):
        load(tmp_path)


def test_a_safetensors_file_that_breaks_off_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UnusableModel, match=r"model\.safetensors"):
        load(tmp_path)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(48)
    del tensors["model.layers.2.mlp.up_proj.weight"], tensors["lm_head.weight"]
    save_file(tensors, file)
    with pytest.raises(UnusableModel) as error:
        load(tmp_path)
    assert str(error.value) == (
        "tensors are missing: lm_head.weight, model.layers.2.mlp.up_proj.weight; "
        "tensors are unexpected: model.layers.1.self_attn.q_proj.bias"
    )


def test_a_tensor_of_a_wrong_shape_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(47, 48)
    save_file(tensors, file)
    with pytest.raises(UnusableModel, match=r"layers\.1\.self_attn\.q_proj.*rows together; 144 were expected"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["BertModel"]}, "architecture 'BertModel' is not supported; known: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported; known: default, linear"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor 0\.5"),
        ({"num_attention_heads": 4}, "4 heads are no multiple of 3"),
        ({"vocab_size": "many"}, r"config\.json: Expected `int`"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    tiny_llama(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(UnusableModel, match=problem):
        load(tmp_path)


def test_older_files_name_rope_scaling_and_theta_differently(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    tiny_llama(tmp_path, rope_parameters=scaling)
    newer = load(tmp_path).config
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    file.write_text(json.dumps(config))
    assert load(tmp_path).config == newer


@pytest.mark.parametrize(("generation", "expected"), [({"eos_token_id": 9}, (9,)), ({}, (5, 7)), (None, (5, 7))])
def test_end_ids_come_from_the_generation_config_where_it_has_any(
    tmp_path: Path, generation: dict[str, int] | None, expected: tuple[int, ...]
) -> None:
    tiny_llama(tmp_path)
    file = tmp_path / "generation_config.json"
    file.unlink()
    if generation is not None:
        file.write_text(json.dumps(generation))
    assert load(tmp_path).eos_token_ids == expected


def test_the_context_can_be_shortened_but_not_stretched(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    source = open_model(find_model(str(tmp_path)))
    assert load_model(source, torch.float32, max_model_len=100).weights.cosine.shape[0] == 100
    with pytest.raises(UnusableModel, match="2000; this model was trained for 1024"):
        load_model(source, torch.float32, max_model_len=2000)


def test_linear_rope_scaling_is_read_from_gguf_and_others_are_refused(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "hf", hidden_size=96)
    path = tmp_path / "model.gguf"
    kind = gguf.GGMLQuantizationType.F32
    write_gguf(path, model, kind, rope_scaling_type=gguf.RopeScalingType.LINEAR, rope_scaling_factor=4.0)
    rope = load(path).config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    write_gguf(path, model, kind, rope_scaling_type=gguf.RopeScalingType.YARN, rope_scaling_factor=4.0)
    with pytest.raises(UnusableModel, match="'yarn' is not supported; known: none, linear"):
        load(path)


def test_gguf_files_that_break_off_or_are_none_are_refused(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "hf")
    path = tmp_path / "model.gguf"
    write_gguf(path, model, gguf.GGMLQuantizationType.F32)
    whole = path.read_bytes()
    assert load(path).config.vocab_size == TINY_VOCAB_SIZE
    for length in (3, 4, 20, 200, 40_000, 130_000, len(whole) - 1000):
        path.write_bytes(whole[:length])
        with pytest.raises(UnusableModel, match=r"not a readable GGUF file|breaks off in tensor"):
            load(path)
    path.write_bytes(b"GGUF" + (77).to_bytes(4, "little") + whole[8:])
    with pytest.raises(UnusableModel, match="version 77"):
        load(path)


def test_a_gguf_file_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnusableModel, match="architecture 'mamba' is not supported; known: llama"):
        load(path)
