"""From tokens to text: nothing is lost, nothing is half, and a stream may be rebuilt anywhere."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.tokenizer.text.detokenizer import (
    MAX_HELD_TOKENS,
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_alphabet,
    detokenizers_of,
    is_byte_level,
)
from services.tokenizer.text.model_tokenizer import ModelTokenizer
from services.tokenizer.text.stream import TextStream

FAMILY = "👨\u200d👩\u200d👧\u200d👦"
HARD_TEXTS = [
    "🦀",
    FAMILY,
    "🇩🇪🏳️‍🌈 naïve café",
    "def f(x):\n\treturn x ** 2  # 0b1010\r\n\r\n",
    "你好, 世界。こんにちは 안녕",
    "   spaces   and\n\n\nnewlines \n",
    "𐍈𝄞 x² + ½ = 12345678.90",
]


def byte_bpe() -> Tokenizer:
    """A byte-level vocabulary of all 256 bytes and few merges, with a special and an added token."""
    alphabet = byte_alphabet()
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "t"), (alphabet[0xF0], alphabet[0x9F])]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<tool call é>", special=False, normalized=False)])
    return tokenizer


BYTE_BPE = byte_bpe()


def sentencepiece_bpe(*, prepend_once: bool) -> Tokenizer:
    """A Llama-like vocabulary: words begin with ▁, unknown characters become bytes, the first space is dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "wo", "rl", "worl"]
    pieces += ["world", "▁world", "▁▁", "\ufffd"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("w", "o"), ("r", "l")]
    merges += [("wo", "rl"), ("worl", "d"), ("▁", "world"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if prepend_once:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id: int | None = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


SENTENCEPIECE = pytest.mark.parametrize("prepend_once", [True, False])


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def test_the_alphabet_of_bytes_is_the_tokenizers_own() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert [byte_alphabet()[byte] for byte in (0x00, 0x20, 0x21, 0xAD, 0xFF)] == ["Ā", "Ġ", "!", "Ń", "ÿ"]


def test_each_kind_of_vocabulary_gets_its_detokenizer() -> None:
    assert is_byte_level(byte_bpe())
    assert not is_byte_level(sentencepiece_bpe(prepend_once=True))
    assert isinstance(detokenizers_of(byte_bpe())([]), ByteDetokenizer)
    assert isinstance(detokenizers_of(sentencepiece_bpe(prepend_once=True))([]), WindowDetokenizer)


def test_a_four_token_emoji_comes_whole_with_its_last_token() -> None:
    ids = list("🦀".encode())  # Of this vocabulary, ids below 256 are the bytes.
    assert len(ids) == 4
    assert pieces_of(detokenizers_of(BYTE_BPE)([]), ids) == ["", "", "", "🦀", ""]


@settings(deadline=None)
@given(st.lists(st.integers(0, 275), max_size=40))
def test_any_byte_tokens_give_what_decoding_them_at_once_gives(ids: list[int]) -> None:
    stream = TextStream(detokenizers_of(BYTE_BPE)([]), silent_ids={id_of(BYTE_BPE, "<end>")})
    text = "".join(stream.push([token_id]) for token_id in ids) + stream.finish()
    assert text == BYTE_BPE.decode(ids, skip_special_tokens=True)


def test_half_a_character_is_never_sent_and_its_remains_are_replaced_at_the_end_only() -> None:
    ids = list("né".encode())
    assert pieces_of(detokenizers_of(BYTE_BPE)([]), ids[:-1]) == ["n", "", "\ufffd"]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_smollm2_streams_hard_texts_whole_and_may_be_rebuilt_at_every_token(text: str, smollm2: ModelTokenizer) -> None:
    ids = list(smollm2.encoder.encode_text(text))
    assert smollm2.decode(ids) == text
    whole = TextStream(smollm2.start_detokenizer([]), ("\n\n\nnewl", "zz"), smollm2.special_ids)
    pieces = [whole.push([token_id]) for token_id in ids]
    pieces.append(whole.finish())
    for num_delivered in range(len(ids) + 1):
        rebuilt = TextStream(smollm2.start_detokenizer([]), ("\n\n\nnewl", "zz"), smollm2.special_ids)
        rebuilt.push(ids[:num_delivered])
        assert rebuilt.num_chars == len("".join(pieces[:num_delivered]))
        rest = [rebuilt.push([token_id]) for token_id in ids[num_delivered:]]
        assert [*rest, rebuilt.finish()] == pieces[num_delivered:]
    expected = text.split("\n\n\nnewl", maxsplit=1)[0]
    assert "".join(pieces) == expected


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.one_of(st.sampled_from("helo wrd"), st.sampled_from("é你🦀\n")), max_size=20))
@SENTENCEPIECE
def test_a_window_streams_what_decoding_at_once_gives(prepend_once: bool, text: str) -> None:
    tokenizer = sentencepiece_bpe(prepend_once=prepend_once)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = pieces_of(detokenizers_of(tokenizer)([]), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@SENTENCEPIECE
def test_a_window_keeps_the_space_between_prompt_and_output(prepend_once: bool) -> None:
    tokenizer = sentencepiece_bpe(prepend_once=prepend_once)
    ids = tokenizer.encode("hello world", add_special_tokens=False).ids
    assert tokenizer.decode(ids[1:]) == "world"
    assert pieces_of(detokenizers_of(tokenizer)(ids[:1]), ids[1:]) == [" world", ""]


def test_a_window_is_rebuilt_at_every_token() -> None:
    tokenizer = sentencepiece_bpe(prepend_once=True)
    prompt, output = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("hello", f" world {FAMILY}é"))
    pieces = pieces_of(detokenizers_of(tokenizer)(prompt), output)
    for num_delivered in range(len(output) + 1):
        rebuilt = detokenizers_of(tokenizer)(prompt)
        for token_id in output[:num_delivered]:
            rebuilt.push(token_id)
        assert pieces_of(rebuilt, output[num_delivered:]) == pieces[num_delivered:]


def test_a_window_does_not_wait_for_ever_for_bytes_that_never_become_a_character() -> None:
    tokenizer = sentencepiece_bpe(prepend_once=True)
    stray = id_of(tokenizer, "<0x80>")
    pieces = pieces_of(detokenizers_of(tokenizer)([]), [stray] * (3 * MAX_HELD_TOKENS))
    assert max(len(piece) for piece in pieces) <= MAX_HELD_TOKENS + 1
    assert "".join(pieces) == "\ufffd" * (3 * MAX_HELD_TOKENS)


def test_a_prompt_that_ends_within_a_character_costs_the_output_nothing() -> None:
    tokenizer = sentencepiece_bpe(prepend_once=True)
    half = [id_of(tokenizer, token) for token in ("<0xE4>", "<0xBD>")]
    output = [id_of(tokenizer, token) for token in ("▁hello", "▁world")]
    assert "".join(pieces_of(detokenizers_of(tokenizer)(half), output)) == "hello world"


def test_special_and_stop_tokens_give_no_text_and_ids_out_of_range_do_no_harm() -> None:
    end = id_of(BYTE_BPE, "<end>")
    stream = TextStream(detokenizers_of(BYTE_BPE)([]), silent_ids={end, ord("!")})
    assert stream.push([end, ord("a"), ord("!"), 999_999, -1, ord("b")]) == "ab"
    assert (stream.num_tokens, stream.num_chars) == (6, 2)


def test_an_added_token_is_written_as_it_is() -> None:
    added = id_of(BYTE_BPE, "<tool call é>")
    assert pieces_of(detokenizers_of(BYTE_BPE)([]), [added]) == ["<tool call é>", ""]


def test_a_stop_string_over_three_tokens_ends_the_text_with_the_token_that_completes_it(
    smollm2: ModelTokenizer,
) -> None:
    ids = list(smollm2.encoder.encode_text("Sure.<|im_end|> more"))
    tokens = [smollm2.decode([token_id]) for token_id in ids]
    assert tokens[:8] == ["Sure", ".<", "|", "im", "_", "end", "|", ">"]
    stream = TextStream(smollm2.start_detokenizer([]), ("<|im",), smollm2.special_ids)
    assert [stream.push([token_id]) for token_id in ids[:4]] == ["Sure", ".", "", ""]
    assert (stream.stop, stream.num_tokens) == ("<|im", 4)
    assert stream.push(ids[4:]) == ""
    assert stream.num_tokens == 4


def test_stop_strings_keep_the_promise_of_min_tokens() -> None:
    stream = TextStream(detokenizers_of(BYTE_BPE)([]), ("x",), min_tokens=2)
    assert stream.push(b"xxyx") == "xxy"
    assert (stream.stop, stream.num_tokens) == ("x", 4)


def test_a_decoder_that_is_more_than_a_join_is_not_taken_for_byte_level() -> None:
    tokenizer = byte_bpe()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert json.loads(tokenizer.to_str())["decoder"]["type"] == "Sequence"
    assert not is_byte_level(tokenizer)
