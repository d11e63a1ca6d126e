"""Tokenizers and templates out of the files that models come in."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from common.models import ModelFiles
from services.tokenizer.text.detokenizer import byte_alphabet
from services.tokenizer.text.errors import UnusableTokenizer
from services.tokenizer.text.gguf import read_metadata, tokenizer_from_metadata
from services.tokenizer.text.loading import load_tokenizer
from services.tokenizer.text.model_tokenizer import ModelTokenizer
from tests.services.tokenizer.test_detokenizer import byte_bpe


def packed(value: Any) -> tuple[int, bytes]:
    """A metadata value's kind and bytes."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case str():
            return 8, struct.pack("<Q", len(value.encode())) + value.encode()
        case list():
            kind = packed(value[0])[0]
            return 9, struct.pack("<IQ", kind, len(value)) + b"".join(packed(item)[1] for item in value)
        case _:
            raise AssertionError(value)


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    fields = b""
    for key, value in metadata.items():
        kind, data = packed(value)
        fields += packed(key)[1] + struct.pack("<I", kind) + data
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + fields)


def small_metadata(**changes: Any) -> dict[str, Any]:
    tokens = [*byte_alphabet(), "<s>", "</s>", "Ġ1", "<tool>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[1] * 256, 3, 3, 1, 4],
        "tokenizer.ggml.merges": ["Ġ 1"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def load_small(path: Path, **changes: Any) -> ModelTokenizer:
    write_gguf(path / "small.gguf", small_metadata(**changes))
    return ModelTokenizer.load(str(path / "small.gguf"), None, max_rendered_chars=1000)


def test_metadata_is_what_the_file_holds(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", small_metadata())
    wanted = small_metadata()
    del wanted["general.architecture"]
    assert read_metadata(tmp_path / "small.gguf", ("tokenizer.",)) == wanted


def test_metadata_is_what_the_gguf_package_wrote(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "every-kind.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in (("uint8", 200), ("int8", -3), ("uint16", 60_000), ("int16", -4), ("uint32", 4 << 28)):
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    for kind, number in (("int32", -5), ("float32", 0.5), ("uint64", 1 << 60), ("int64", -6), ("float64", 0.25)):
        getattr(writer, f"add_{kind}")(f"x.{kind}", number)
    writer.add_bool("x.bool", True)
    writer.add_string("x.string", "né 🦀")
    writer.add_array("x.strings", ["a", "né"])
    writer.add_array("x.numbers", [1, -2])
    writer.add_array("x.nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_metadata(path, ("x.",)) == {
        "x.uint8": 200,
        "x.int8": -3,
        "x.uint16": 60_000,
        "x.int16": -4,
        "x.uint32": 4 << 28,
        "x.int32": -5,
        "x.float32": 0.5,
        "x.uint64": 1 << 60,
        "x.int64": -6,
        "x.float64": 0.25,
        "x.bool": True,
        "x.string": "né 🦀",
        "x.strings": ["a", "né"],
        "x.numbers": [1, -2],
        "x.nested": [[1, 2], [3]],
    }


def test_special_and_added_tokens_come_from_the_token_types(tmp_path: Path) -> None:
    model = load_small(tmp_path)
    assert model.special_ids == {256, 257}
    assert list(model.encoder.encode_text("a<tool>")) == [ord("a") - 33 + list(byte_alphabet()).index("!"), 259]


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [256], []),
        ({"add_eos_token": True}, [], [257]),
        ({"add_bos_token": True, "add_eos_token": True}, [256], [257]),
        ({"add_bos_token": False, "add_eos_token": False}, [], []),
    ],
)
def test_the_flags_for_beginning_and_end_are_honoured(
    tmp_path: Path, flags: dict[str, bool], before: list[int], after: list[int]
) -> None:
    model = load_small(tmp_path, **flags)
    assert list(model.encoder.encode_text("a")) == [*before, ord("a"), *after]
    assert list(model.encoder.encode_text("a", add_special_tokens=False)) == [ord("a")]
    assert list(model.encoder.encode_chat([{"role": "user", "content": "a"}])) == [256, ord("a"), 257]


def test_digits_stand_alone_where_the_model_was_trained_so_and_merge_where_not(tmp_path: Path) -> None:
    apart, together = load_small(tmp_path), load_small(tmp_path, pre="gpt-2")
    assert list(apart.encoder.encode_text(" 1")) == [0x20, ord("1")]
    assert list(together.encoder.encode_text(" 1")) == [258]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "llama"}, "'llama'"),
        ({"pre": "qwen2"}, "'qwen2'"),
        ({"tokens": ["a", "a"]}, "1 tokens are there twice"),
    ],
)
def test_a_kind_that_is_not_known_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnusableTokenizer, match=problem):
        tokenizer_from_metadata(small_metadata(**changes))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(path, small_metadata())
    whole = path.read_bytes()
    for damaged in (b"", b"GGML" + whole[4:], whole[:4] + b"\x09" + whole[5:], whole[:3000], whole[:-1], whole[:20]):
        path.write_bytes(damaged)
        with pytest.raises(UnusableTokenizer, match="damaged"):
            read_metadata(path, ("",))


def write_directory(path: Path, **files: Any) -> ModelFiles:
    tokenizer = byte_bpe()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=10)
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        path_of_file = path / name.replace("__", ".")
        path_of_file.write_text(content if isinstance(content, str) else json.dumps(content))
    return ModelFiles(name="small", directory=path)


def test_a_directory_gives_tokenizer_template_and_named_tokens(tmp_path: Path) -> None:
    files = load_tokenizer(
        write_directory(
            tmp_path,
            tokenizer_config__json={
                "chat_template": "from config",
                "bos_token": {"content": "<end>", "lstrip": False},
                "eos_token": "<end>",
                "pad_token": None,
            },
        )
    )
    assert files.chat_template == "from config"
    assert files.named_tokens == {"bos_token": "<end>", "eos_token": "<end>"}
    assert files.tokenizer.encode("abcd").ids == [97, 98, 99, 100], "neither cut nor padded"


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"tokenizer_config__json": {"chat_template": "a"}, "chat_template__jinja": "b"}, "b"),
        ({"tokenizer_config__json": {"chat_template": "a"}, "chat_template__json": {"chat_template": "c"}}, "c"),
        (
            {
                "tokenizer_config__json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "t"},
                        {"name": "default", "template": "d"},
                    ]
                }
            },
            "d",
        ),
        ({"tokenizer_config__json": {}}, None),
        ({}, None),
    ],
)
def test_a_template_is_taken_from_the_newest_place(tmp_path: Path, files: dict[str, Any], template: str | None) -> None:
    assert load_tokenizer(write_directory(tmp_path, **files)).chat_template == template


def test_the_operators_template_comes_before_the_models(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine", "utf-8")
    model = write_directory(tmp_path, chat_template__jinja="the model's")
    assert load_tokenizer(model, mine).chat_template == "mine"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"tokenizer__json": "{"}, "tokenizer.json"),
        ({"tokenizer_config__json": "[1]"}, "tokenizer_config.json"),
        ({"tokenizer_config__json": {"chat_template": 7}}, "neither text nor a list"),
    ],
)
def test_a_directory_that_cannot_be_used_says_which_file(tmp_path: Path, files: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnusableTokenizer, match=problem):
        load_tokenizer(write_directory(tmp_path, **files))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableTokenizer, match=r"no tokenizer\.json"):
        load_tokenizer(ModelFiles(name="small", directory=tmp_path))
