"""Everything between text and tokens that one model needs, loaded once."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from common.models import find_model
from services.tokenizer.text.chat_template import ChatTemplate
from services.tokenizer.text.detokenizer import Detokenizer, byte_table, detokenizers_of, is_byte_level
from services.tokenizer.text.encoder import Encoder, special_ids_of
from services.tokenizer.text.loading import TokenizerFiles, load_tokenizer
from services.tokenizer.text.token_bytes import token_bytes_of


class ModelTokenizer:
    """One model's tokenizer and chat template. May be used from several threads at a time."""

    def __init__(self, files: TokenizerFiles, *, max_rendered_chars: int) -> None:
        """max_rendered_chars bounds what the chat template makes of messages.

        Raises:
            UnusableTokenizer: If the chat template does not compile.
        """
        self._tokenizer: Tokenizer = files.tokenizer
        self._start_detokenizer = detokenizers_of(self._tokenizer)
        template = files.chat_template
        self.encoder = Encoder(
            self._tokenizer,
            None if template is None else ChatTemplate(template, files.named_tokens, max_rendered_chars),
        )
        self.special_ids = special_ids_of(self._tokenizer)
        self.max_token_chars = _max_token_chars(self._tokenizer)

    @classmethod
    def load(cls, model: str, chat_template: Path | None, *, max_rendered_chars: int) -> "ModelTokenizer":
        """Load a model's tokenizer by the model's name or path.

        Raises:
            OSError: If its files are missing, or cannot be used; the message says why.
        """
        return cls(load_tokenizer(find_model(model), chat_template), max_rendered_chars=max_rendered_chars)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """What each token adds to the text. Made when it is first asked for, which takes a while: not in a loop."""
        return token_bytes_of(self._tokenizer)

    def start_detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for the output that follows prompt_ids."""
        return self._start_detokenizer(prompt_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a list of tokens, special ones included: what `/detokenize` shows."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def _max_token_chars(tokenizer: Tokenizer) -> int | None:
    """Characters of the longest token, where so many characters cannot be fewer tokens than that; else None.

    A normalizer, or one unknown token for a run of unknown characters, can make few tokens of any text.
    """
    if not is_byte_level(tokenizer) or tokenizer.normalizer is not None:
        return None
    return max(len(token) for token in byte_table(tokenizer))
