"""A tiny random model with a real vocabulary: the whole system with it is up in a few seconds."""

from pathlib import Path
from typing import Any

from common.models import ModelFiles, find_model
from services.tokenizer.text.loading import load_tokenizer
from tests.gpu_worker.hf import smollm2_or_skip, tiny_llama

VOCAB_SIZE = 49152


def tiny_model(directory: Path, **config: Any) -> Path:
    """Save a random Llama with SmolLM2's tokenizer and chat template; return its directory.

    Its text is noise. Greedy decoding of it is as repeatable as of any model. config is more of transformers'
    LlamaConfig.
    """
    smollm2_or_skip()
    path = directory / "tiny"
    settings: dict[str, Any] = {"max_position_embeddings": 4096, "initializer_range": 0.1, "eos_token_id": 2, **config}
    tiny_llama(path, vocab_size=VOCAB_SIZE, **settings)
    files: ModelFiles = find_model("smollm2")
    tokenizer = load_tokenizer(files).tokenizer
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return path
