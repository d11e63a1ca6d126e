"""The running system against Hugging Face transformers on the same weights, both in float32."""

import concurrent.futures
import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.gpu_worker.hf import hf_smollm2
from tests.integration.system import System

PROMPT_LENS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 200, 233, 377, 500, 610, 800, 987, 1597, 4000)
NUM_OUTPUT_TOKENS = 6
TIE = 1e-4
"""Two candidates closer than this are as good as tied: kernels that sum in another order may swap them."""
MAX_TIES = 3
"""Prompts, of those above, whose text may part at such a tie."""


# Ordinary words in a random order; the text means nothing, but every id is a word that the model knows.
_generator = random.Random(1)
WORDS = [_generator.randrange(1000, 20_000) for _ in range(PROMPT_LENS[-1])]
PROMPTS = [WORDS[:length] for length in PROMPT_LENS]
"""Each begins as the next one does, so that the reference need not read each from its beginning."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads of torch wait for each other by spinning: with anything else on the machine, two take far longer."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@torch.no_grad()
def greedy_after_each() -> list[tuple[list[int], list[float]]]:
    """For each prompt: tokens of transformers, and at each the distance between its best two candidates."""
    model = hf_smollm2()
    # Renamed in version 5; the old name warns there.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    kv_cache: Any = None
    found = []
    for begin, end in pairwise((0, *PROMPT_LENS)):
        tokens: list[int] = []
        distances: list[float] = []
        fresh = WORDS[begin:end]
        for _ in range(NUM_OUTPUT_TOKENS):
            output = model(torch.tensor([fresh]), **{argument: kv_cache}, use_cache=True, logits_to_keep=1)
            best = output.logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            distances.append(float(best.values[0] - best.values[1]))
            kv_cache, fresh = output.past_key_values, tokens[-1:]
        kv_cache.crop(1 - NUM_OUTPUT_TOKENS)  # All but the last were read.
        found.append((tokens, distances))
    return found


def text_of(system: System, tokens: list[int]) -> str:
    return str(system.post("/detokenize", {"model": "smollm2", "tokens": tokens}).json()["prompt"]) if tokens else ""


def texts_of(system: System, num_at_once: int) -> list[str]:
    def complete(prompt: list[int]) -> str:
        # Alone, a prompt finds in the prefix cache what it begins with; in batches each is read anew.
        salt = {} if num_at_once == 1 else {"cache_salt": f"of {len(prompt)} tokens"}
        answer = system.complete(prompt, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, **salt)
        assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == (not salt and len(prompt) > 21)
        return str(answer["choices"][0]["text"])

    with concurrent.futures.ThreadPoolExecutor(num_at_once) as pool:
        return list(pool.map(complete, PROMPTS))


@pytest.mark.timeout(1200)
def test_greedy_text_equals_transformers_alone_and_in_hybrid_batches_of_eight(system: System) -> None:
    with one_thread():
        expected = greedy_after_each()
    for num_at_once in (1, 8):
        ties = []
        ours = texts_of(system, num_at_once)
        for length, (tokens, distances), text in zip(PROMPT_LENS, expected, ours, strict=True):
            if text == text_of(system, tokens):
                continue
            tied = [index for index, distance in enumerate(distances) if distance < TIE]
            assert tied, f"prompt of {length} tokens, {num_at_once} at once: {text!r}, not {text_of(system, tokens)!r}"
            assert text.startswith(text_of(system, tokens[: tied[0]]))
            ties.append((length, tied[0], distances[tied[0]]))
        print(f"{num_at_once} at once: texts that part at a tie (prompt length, token, distance): {ties}")
        assert len(ties) <= MAX_TIES
    system.wait_idle()
