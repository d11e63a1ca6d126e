"""Penalties, biases, log-probabilities and echoes of the running system, against transformers on the same weights."""

import concurrent.futures
from typing import Any

import openai
import pytest
import torch
from torch import Tensor

from tests.gpu_worker.hf import hf_logits, hf_smollm2
from tests.integration.system import System

TOLERANCE = 0.01
"""Of log-probabilities down to -20: thirty layers in float32, summed in another order."""
TIE = 1e-3
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown"
EMOJI = "\U0001f3d6\ufe0f"  # four tokens in SmolLM2's vocabulary


@pytest.fixture
def client(system: System) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)


def ids_of(system: System, text: str) -> list[int]:
    ids: list[int] = system.post("/tokenize", {"model": "smollm2", "prompt": text}).json()["tokens"]
    return ids


def logprobs_of(token_ids: list[int]) -> Tensor:
    """After each token: (tokens, vocab)."""
    return hf_logits(hf_smollm2(), token_ids).log_softmax(dim=-1)


def penalised(logits: Tensor, prompt: list[int], output: list[int], fields: dict[str, Any]) -> Tensor:
    """The documented definitions, plainly."""
    adjusted = logits.clone()
    factor = fields.get("repetition_penalty", 1.0)
    for token in set(prompt + output):
        adjusted[token] = adjusted[token] / factor if adjusted[token] > 0 else adjusted[token] * factor
    for token in set(output):
        adjusted[token] -= fields.get("presence_penalty", 0) + fields.get("frequency_penalty", 0) * output.count(token)
    for token, bias in fields.get("logit_bias", {}).items():
        adjusted[int(token)] += bias
    return adjusted


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0, "presence_penalty": -0.5},
        {"repetition_penalty": 1.6},
        {"logit_bias": {"28": -100, "260": 4.5}, "frequency_penalty": 0.7},
    ],
    ids=str,
)
def test_penalised_greedy_output_equals_a_plain_computation(system: System, fields: dict[str, Any]) -> None:
    prompt = ids_of(system, PROMPT)
    tokens = system.complete(prompt, max_tokens=12, ignore_eos=True, logprobs=0, **fields)["choices"][0]
    output = ids_of(system, PROMPT + tokens["text"])[len(prompt) :]
    plain = system.complete(prompt, max_tokens=12, ignore_eos=True)["choices"][0]["text"]
    assert tokens["text"] != plain, "the model would repeat the sentence"
    logits = hf_logits(hf_smollm2(), prompt + output)
    for index, token in enumerate(output):
        adjusted = penalised(logits[len(prompt) + index - 1], prompt, output[:index], fields)
        assert float(adjusted.max() - adjusted[token]) < TIE, f"token {index}"
    # Whatever penalties did to the draw, what is told is the model's own.
    logprobs = logits.log_softmax(dim=-1)
    expected = [float(logprobs[len(prompt) + index - 1, token]) for index, token in enumerate(output)]
    assert tokens["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=TOLERANCE)


def test_an_echoed_prompt_in_chunks_is_scored_as_by_transformers_also_beside_others(system: System) -> None:
    text = " ".join(f"item {index} costs {index * 7} euros," for index in range(60))  # more than two chunks
    prompt = ids_of(system, text)
    assert len(prompt) > 512
    expected = logprobs_of(prompt)

    def ask(_: int) -> dict[str, Any]:
        return system.complete(text, max_tokens=2, echo=True, logprobs=2)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        answers = [ask(0), *pool.map(ask, range(3))]
    for answer in answers:
        choice = answer["choices"][0]
        assert choice["text"].startswith(text)
        lists = choice["logprobs"]
        assert "".join(lists["tokens"]) == choice["text"]
        assert lists["token_logprobs"][0] is None
        told = torch.tensor(lists["token_logprobs"][1 : len(prompt)])
        known = expected[:-1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(told, known, atol=TOLERANCE, rtol=0)
        best = expected.max(dim=-1).values.tolist()
        for index, top in enumerate(lists["top_logprobs"][1 : len(prompt)]):
            assert 2 <= len(top) <= 3
            assert max(top.values()) == pytest.approx(best[index], abs=TOLERANCE)
        assert lists["text_offset"] == [sum(map(len, lists["tokens"][:index])) for index in range(len(lists["tokens"]))]
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "logits of all of it are needed"


def test_a_chats_tokens_are_the_same_whole_and_streamed_and_their_bytes_are_its_text(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Repeat: {EMOJI} {EMOJI} {EMOJI}"}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None
    assert whole.usage is not None
    assert len(content) == whole.usage.completion_tokens
    text = b"".join(bytes(token.bytes or ()) for token in content).decode(errors="replace")
    assert text.removesuffix("<|im_end|>") == whole.choices[0].message.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob, "greedy takes the likeliest"

    chunks = list(client.chat.completions.create(stream=True, **fields))
    streamed = [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or ()
    ]
    assert [token.token for token in streamed] == [token.token for token in content]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in content], abs=TOLERANCE)


def test_an_echo_of_ids_is_their_text_once_for_each_choice_and_streamed_first(system: System) -> None:
    prompt = ids_of(system, PROMPT)
    answer = system.complete(prompt, max_tokens=3, echo=True, n=2)
    for choice in answer["choices"]:
        assert choice["text"].startswith(PROMPT)
        assert choice["logprobs"] is None
    events = list(system.stream(prompt=prompt, max_tokens=3, echo=True, temperature=0))
    pieces = [choice["text"] for event in events for choice in event["choices"]]
    assert "".join(pieces) == answer["choices"][0]["text"]
    assert pieces[0].startswith(PROMPT)


def test_a_bias_of_100_is_all_that_comes_and_one_of_minus_100_never(system: System) -> None:
    forced = system.complete(PROMPT, max_tokens=4, temperature=1.0, seed=3, logit_bias={"260": 100}, logprobs=0)
    assert len(set(forced["choices"][0]["logprobs"]["tokens"])) == 1
    best = system.complete(PROMPT, max_tokens=1, logprobs=1)["choices"][0]["logprobs"]["tokens"][0]
    (banned_id,) = ids_of(system, best)
    banned = system.complete(PROMPT, max_tokens=8, logit_bias={str(banned_id): -100}, logprobs=0)
    assert best not in banned["choices"][0]["logprobs"]["tokens"]
