"""From prompts to tokens, such that no client can write a special token.

A special token (the end of a turn, say) that stands in a client's text is plain text: `<|im_end|>` is ten characters
there. What the chat template writes is special. Telling them apart after the template has mixed them needs two marks
that no client can guess:

1. Before rendering, each special token's text in the messages gives way to a stand-in, so that what looks like a
   special token in the rendered text is the template's.
2. After rendering, the template's special tokens give way to *aliases*, and then the clients' texts come back.

The tokenizer that encodes takes special tokens' texts for plain text, and knows each alias as an added token. So it
sees one whole text, cut at the template's special tokens, with every border and merge as it would be without all this.
"""

import json
import re
import secrets
from array import array
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from services.tokenizer.text.chat_template import ChatTemplate
from services.tokenizer.text.errors import EncodeError


class Encoder:
    """Encodes texts and chats. May be used from several threads at a time."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        """tokenizer itself is left as it is; the encoder works on a copy."""
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._chat_template = chat_template
        specials = {token_id: token for token_id, token in _added_tokens(tokenizer).items() if token.special}
        self._special_texts = [token.content for token in specials.values()]
        # Longest first: of two that begin at one place, the tokenizer too takes the longer.
        pattern = "|".join(re.escape(text) for text in sorted(self._special_texts, key=len, reverse=True))
        self._special = re.compile(pattern or "(?!)")
        nonce = secrets.token_hex(16)
        self._alias_of = {text: f"\ue000{nonce}{index:06}\ue001" for index, text in enumerate(self._special_texts)}
        self._tokenizer.add_tokens([_alias(token, self._alias_of[token.content]) for token in specials.values()])
        self._tokenizer.encode_special_tokens = True
        self._id_of_alias: dict[int, int] = {}
        for token_id, token in specials.items():
            alias_id = self._tokenizer.token_to_id(self._alias_of[token.content])
            assert alias_id is not None, "an alias is in the vocabulary, having been added to it"
            self._id_of_alias[alias_id] = token_id
        self._never_plain = frozenset(specials) - {_unknown_id_of(tokenizer)}
        self._first_alias_id = min(self._id_of_alias, default=1 << 31)
        # Digits only, so that templates which change case or trim leave a stand-in as it is.
        self._stand_in = "".join(secrets.choice("0123456789") for _ in range(40))
        self._stood_in = re.compile(self._stand_in + "([0-9]{6})")

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> "array[int]":
        """Return the tokens of a client's text, between the beginning and end tokens that the model wants, if any.

        Raises:
            EncodeError: If the tokenizer cannot encode it, or only as a special token.
        """
        try:
            # As a batch, for which tokenizers lets go of the interpreter: else streams would wait for the text's end.
            encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        except Exception as error:  # tokenizers raises nothing narrower, for texts that a vocabulary has no tokens for.
            raise EncodeError(f"the tokenizer cannot encode this text: {error}") from error
        if not self._never_plain.isdisjoint(encoding.ids):
            # Some vocabularies (Unigram's) list special tokens among the plain ones, and find them without a mark.
            culprit = next(
                token for token, i in zip(encoding.tokens, encoding.ids, strict=True) if i in self._never_plain
            )
            raise EncodeError(f"this model's tokenizer cannot take {culprit!r} for plain text")
        if add_special_tokens:
            encoding = self._tokenizer.post_process(encoding)
        ids = encoding.ids
        if max(ids, default=0) >= self._first_alias_id:
            ids = [self._id_of_alias.get(token_id, token_id) for token_id in ids]
        return array("i", ids)

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, max_chars: int | None = None
    ) -> "array[int]":
        """Return the tokens of the messages, rendered by the chat template.

        Raises:
            EncodeError: If there is no template, it does not accept the messages, or they have more than max_chars
                characters once rendered.
        """
        if self._chat_template is None:
            raise EncodeError("this model has no chat template")
        try:
            harmless = [self._without_specials(message) for message in messages]
        except RecursionError as error:
            raise EncodeError("messages are nested too deeply") from error
        rendered = self._chat_template.render(harmless, add_generation_prompt=add_generation_prompt)
        if max_chars is not None and len(rendered) > max_chars:
            raise EncodeError(f"messages have {len(rendered)} characters; no more than {max_chars} can fit this model")
        marked = self._special.sub(lambda match: self._alias_of[match[0]], rendered)
        text = self._stood_in.sub(lambda match: self._special_texts[int(match[1])], marked)
        return self.encode_text(text, add_special_tokens=False)

    def _without_specials(self, value: Any) -> Any:
        """The same plain JSON value, with stand-ins for special tokens in every text."""
        match value:
            case str():
                return self._special.sub(self._stand_in_for, value)
            case dict():
                return {self._without_specials(key): self._without_specials(item) for key, item in value.items()}
            case list() | tuple():
                return [self._without_specials(item) for item in value]
            case _:
                return value

    def _stand_in_for(self, match: re.Match[str]) -> str:
        return f"{self._stand_in}{self._special_texts.index(match[0]):06}"


def special_ids_of(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of the special tokens: they give no text."""
    return frozenset(token_id for token_id, token in _added_tokens(tokenizer).items() if token.special)


def _added_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    return added


def _unknown_id_of(tokenizer: Tokenizer) -> int | None:
    """The token for what a vocabulary has no token for: often a special one, and rightly found in plain text."""
    model = json.loads(tokenizer.to_str())["model"]
    if (token := model.get("unk_token")) is not None:
        token_id: int | None = tokenizer.token_to_id(token)
        return token_id
    unknown_id: int | None = model.get("unk_id")
    return unknown_id


def _alias(token: AddedToken, text: str) -> AddedToken:
    return AddedToken(
        text, special=False, normalized=False, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word
    )
