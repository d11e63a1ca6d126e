"""Prompts of an exact number of tokens, with a real tokenizer."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from loadtest.prompts import NUM_UNIQUE_WORDS, WORDS, PromptMaker, Vocabulary, vocabulary_of_file


def byte_level_tokenizer(adds_start: bool) -> Tokenizer:
    """A small byte-level BPE, as Llama 3's and SmolLM2's are, trained here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([" " + " ".join(WORDS)] * 20, trainer)
    if adds_start:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.mark.parametrize("adds_start", [True, False])
def test_a_prompt_has_exactly_the_tokens_asked_for(tmp_path: Path, adds_start: bool) -> None:
    tokenizer = byte_level_tokenizer(adds_start)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    prompts = PromptMaker(vocabulary_of_file(file, as_ids=False), seed=1)

    for index, length in enumerate((2, 3, 17, 500, 100_000)):
        prompt = prompts.make(length, index, prefix_share=0.3)
        assert isinstance(prompt, str)
        assert len(tokenizer.encode(prompt).ids) == length


def test_ids_leave_special_tokens_out(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    byte_level_tokenizer(adds_start=True).save(str(file))
    prompt = PromptMaker(vocabulary_of_file(tmp_path, as_ids=True), seed=1).make(5000, 0)

    assert len(prompt) == 5000
    assert 0 not in prompt


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")

    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        vocabulary_of_file(file, as_ids=False)


@given(length=st.integers(1, 300), share=st.floats(0, 1), seed=st.integers(0, 5))
def test_a_prompt_is_long_as_asked_shares_as_asked_and_is_the_same_again(length: int, share: float, seed: int) -> None:
    prompts = PromptMaker(Vocabulary(words=WORDS), seed)
    one, other = (str(prompts.make(length, index, prefix_share=share)).split() for index in (1, 2))
    num_shared = round(length * share)

    assert len(one) == len(other) == length
    assert one[:num_shared] == other[:num_shared]
    if length - num_shared >= NUM_UNIQUE_WORDS:
        assert one[num_shared : num_shared + NUM_UNIQUE_WORDS] != other[num_shared : num_shared + NUM_UNIQUE_WORDS]
    assert prompts.make(length, 1, prefix_share=share) == " " + " ".join(one)
