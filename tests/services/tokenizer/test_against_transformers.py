"""Hugging Face transformers as the reference, on the same GGUF file."""

from typing import Any

import pytest
from tokenizers import pre_tokenizers

from common.models import find_model
from services.tokenizer.text.model_tokenizer import ModelTokenizer
from tests.services.tokenizer.test_detokenizer import HARD_TEXTS

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 17 * 23 =  \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n\n"},
        {"role": "user", "content": "é 🦀 <b>&amp;</b> {{ x }}"},
    ],
    [{"role": "user", "content": ""}],
]

TEXTS = [
    *HARD_TEXTS,
    "  123",
    "I'll they've DON'T",
    "١٢٣ ½ ²",
    "a  b   c \n\n d",
    "\x00\x01\x7f",
    "1" * 50,
    " ",
    "x" * 200,
]


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' own reading of the file, with the one thing that it leaves out: SmolLM2's tokenizer.json splits
    digits before GPT-2's rule (as llama.cpp's `smollm` does), and transformers knows GPT-2's rule alone."""
    transformers = pytest.importorskip("transformers")
    path = find_model("smollm2").gguf
    assert path is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_same_tokens(text: str, reference: Any, smollm2: ModelTokenizer) -> None:
    ids = list(smollm2.encoder.encode_text(text))
    assert ids == reference(text)["input_ids"]
    assert smollm2.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chats_have_the_same_tokens(
    messages: list[dict[str, Any]], add_generation_prompt: bool, reference: Any, smollm2: ModelTokenizer
) -> None:
    ids = smollm2.encoder.encode_chat(messages, add_generation_prompt=add_generation_prompt)
    expected = reference.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=True)
    assert list(ids) == expected["input_ids"]
    text = reference.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    assert smollm2.decode(ids) == text
