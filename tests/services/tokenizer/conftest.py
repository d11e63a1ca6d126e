"""The real tokenizer that most tests here use."""

import pytest

from services.tokenizer.text.model_tokenizer import ModelTokenizer


@pytest.fixture(scope="session")
def smollm2() -> ModelTokenizer:
    """SmolLM2's tokenizer and chat template, from the GGUF file that `legato model pull smollm2` fetches."""
    return ModelTokenizer.load("smollm2", None, max_rendered_chars=100_000)
