"""Scores and echoed prompts on their way through the tokenizer."""

import pytest

from common.ids import RequestId, pack_ids
from common.messages.cards import ModelCard
from common.messages.logprobs import TokenLogprob, TokenScores
from common.messages.requests import IdsPrompt, PromptDelta, RequestQueued, Sampling
from common.messages.streams import PromptScored, StreamBatch, TokensSampled
from services.tokenizer.events import FromScheduler
from services.tokenizer.text.model_tokenizer import ModelTokenizer
from services.tokenizer.text.token_bytes import token_bytes_of
from tests.services.tokenizer.test_detokenizer import byte_bpe, sentencepiece_bpe
from tests.services.tokenizer.world import EOS, STAMPS, World, pool_card

EMOJI = "\U0001f3d6\ufe0f"  # four tokens in SmolLM2's vocabulary
SCORED = Sampling(temperature=0.0, logprobs=1)


@pytest.fixture
def world(smollm2: ModelTokenizer) -> World:
    return World(smollm2)


def sampled(name: str, token_ids: list[int], first_index: int, top_ids: list[int]) -> TokensSampled:
    logprobs = [-1.0 * token for token in range(len(token_ids))]
    scores = TokenScores.of(logprobs, top_ids, [-0.5] * len(top_ids))
    return TokensSampled(RequestId(name), 1, first_index, tuple(token_ids), scores=scores)


def prompts(world: World, name: str) -> list[PromptDelta]:
    return [prompt for batch in world.batches() for prompt in batch.prompts if prompt.request_id == name]


def output_logprobs(world: World, name: str) -> list[TokenLogprob]:
    return [logprob for delta in world.deltas(name) for logprob in delta.logprobs]


def scored(world: World, name: str, first_index: int, num_tokens: int) -> None:
    scores = TokenScores.of([-float(index) for index in range(first_index, first_index + num_tokens)])
    world.step(FromScheduler(StreamBatch(scored=(PromptScored(RequestId(name), 1, first_index, scores),))))


def test_tokens_of_half_a_character_are_scored_with_their_own_bytes_and_offsets(world: World) -> None:
    world.arrive("a", sampling=SCORED)
    ids = world.ids(f"Hi {EMOJI}!")
    world.batch(sampled("a", ids, 0, top_ids=ids))
    logprobs = output_logprobs(world, "a")
    assert b"".join(logprob.token for logprob in logprobs).decode() == world.text("a") == f"Hi {EMOJI}!"
    assert [logprob.logprob for logprob in logprobs] == [-1.0 * index for index in range(len(ids))]
    assert logprobs[-1].text_offset == len(f"Hi {EMOJI}")
    assert all(logprob.top[0].token == logprob.token for logprob in logprobs)
    for index, logprob in enumerate(logprobs):
        complete = b"".join(logprob.token for logprob in logprobs[:index]).decode(errors="ignore")
        assert logprob.text_offset == len(complete)


def test_tokens_that_came_before_are_not_scored_twice_and_none_after_a_stop_string(world: World) -> None:
    world.arrive("a", sampling=SCORED, stop=(" world",))
    ids = world.ids("Hello world again")
    world.batch(sampled("a", ids[:1], 0, top_ids=ids[:1]))
    world.batch(sampled("a", ids, 0, top_ids=ids))
    assert [logprob.token for logprob in output_logprobs(world, "a")] == [b"Hello", b" world"]
    assert world.text("a") == "Hello"
    for delta in world.deltas("a"):
        assert len(delta.logprobs) == len(delta.token_ids)


def test_special_tokens_are_scored_by_their_names_and_give_no_text(world: World) -> None:
    world.arrive("a", sampling=SCORED)
    world.batch(sampled("a", [*world.ids("Hi"), EOS], 0, top_ids=[EOS, EOS]))
    last = output_logprobs(world, "a")[-1]
    assert (last.token, last.text_offset, world.text("a")) == (b"<|im_end|>", 2, "Hi")


def test_requests_that_do_not_ask_get_no_scores(world: World) -> None:
    world.arrive("a")
    world.batch(world.sampled("a", world.ids("Hi"), 0))
    assert output_logprobs(world, "a") == []
    assert prompts(world, "a") == []


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "ids"])
def test_an_echo_is_the_prompt_with_its_first_token_when_it_is_queued_and_the_others_as_they_are_scored(
    world: World, is_text: bool
) -> None:
    text = f"Ahoy {EMOJI} there"
    ids = world.ids(text)
    prompt = text if is_text else IdsPrompt(token_ids=pack_ids(ids))
    world.arrive("a", prompt=prompt, has_echo=True, sampling=Sampling(logprobs=0, prompt_logprobs=0))
    world.batch(queued=(RequestQueued(request_id=RequestId("a"), attempt=1, num_prompt_tokens=len(ids)),))
    (first,) = prompts(world, "a")
    assert (first.text, first.first_index) == (text, 0)
    assert [logprob.logprob for logprob in first.logprobs] == [None]
    scored(world, "a", 1, 3)
    scored(world, "a", 4, len(ids) - 4)
    logprobs = [logprob for prompt in prompts(world, "a") for logprob in prompt.logprobs]
    assert b"".join(logprob.token for logprob in logprobs).decode() == text
    assert [logprob.logprob for logprob in logprobs[1:]] == [-float(index) for index in range(1, len(ids))]
    assert logprobs[-1].text_offset == len(f"Ahoy {EMOJI}")
    world.batch(sampled("a", world.ids("!"), 0, top_ids=[]))
    assert [logprob.text_offset for logprob in output_logprobs(world, "a")] == [len(text)], "after the echo"


def test_an_echo_without_scores_is_text_alone(world: World) -> None:
    world.arrive("a", prompt="Ahoy", has_echo=True)
    world.batch(queued=(RequestQueued(request_id=RequestId("a"), attempt=1, num_prompt_tokens=2),))
    assert [(prompt.text, prompt.logprobs) for prompt in prompts(world, "a")] == [("Ahoy", ())]
    world.batch(world.sampled("a", world.ids(" there"), 0))
    assert world.text("a") == " there"
    assert world.deltas("a")[0].text_offset == 0, "of the output"


def test_scores_with_a_gap_end_the_link(world: World) -> None:
    world.arrive("a", prompt="one two three four", has_echo=True, sampling=Sampling(prompt_logprobs=0, logprobs=0))
    scored(world, "a", 2, 1)
    assert "scores from prompt token 2 on, not 1" in world.scheduler_drops[0]


def test_a_bias_of_an_unknown_token_is_refused(world: World) -> None:
    world.arrive("a", sampling=Sampling(logit_bias=((49152, 1.0),)))
    assert (world.rejection("a").param, "49152" in world.rejection("a").detail) == ("logit_bias", True)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SCORED, "logprobs"),
        (Sampling(prompt_logprobs=0), "logprobs"),
        (Sampling(presence_penalty=0.5), "presence_penalty"),
        (Sampling(frequency_penalty=-1.0), "frequency_penalty"),
        (Sampling(repetition_penalty=1.1), "repetition_penalty"),
        (Sampling(logit_bias=((5, 1.0),)), "logit_bias"),
        (Sampling(temperature=0.5), None),
    ],
)
def test_what_workers_do_not_say_they_can_do_is_refused_by_name(
    world: World, sampling: Sampling, param: str | None
) -> None:
    plain = ModelCard(name="smollm2", max_model_len=64, vocab_size=49152, eos_token_ids=(EOS,))
    world.step(FromScheduler(pool_card(model=plain)))
    world.arrive("a", sampling=sampling)
    if param is None:
        assert world.arrivals()
    else:
        assert world.rejection("a").param == param


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_bytes_of_tokens_join_to_the_text(kind: str) -> None:
    tokenizer = byte_bpe() if kind == "bytes" else sentencepiece_bpe(prepend_once=True)
    table = token_bytes_of(tokenizer)
    for text in ("hello world", f"caf\u00e9 {EMOJI}"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(table[token_id] for token_id in ids).decode().strip() == text
    assert len(table) == max(tokenizer.get_vocab().values()) + 1
    assert STAMPS  # of batches
