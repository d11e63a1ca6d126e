"""Workers of several ranks in the whole system: the same text as of one, and a lost rank that no stream notices."""

import concurrent.futures
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from tests.gpu_worker.hf import hf_greedy
from tests.integration.system import System, running, wait_until
from tests.integration.tiny import tiny_model

QUICK = {"LEGATO_PROFILE_SECONDS": "0.1", "OMP_NUM_THREADS": "1"}
PROMPT_LENS = (1, 7, 40, 150)
NUM_OUTPUT_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), num_attention_heads=4, num_key_value_heads=1)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Tokens of one process: transformers' own."""
    reference: Any = LlamaForCausalLM.from_pretrained(model)
    return [hf_greedy(reference.float().eval(), prompt_of(length), NUM_OUTPUT_TOKENS) for length in PROMPT_LENS]


def prompt_of(length: int) -> list[int]:
    return [1000 + (length * 7919 + index * 104729) % 20_000 for index in range(length)]


def texts_of(system: System) -> list[str]:
    def complete(length: int) -> str:
        answer = system.complete(prompt_of(length), model="tiny", max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
        return str(answer["choices"][0]["text"])

    with concurrent.futures.ThreadPoolExecutor(len(PROMPT_LENS)) as pool:
        return list(pool.map(complete, PROMPT_LENS))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_serve_the_text_of_one_process_and_a_lost_rank_costs_no_stream_a_token(
    model: Path, expected: list[list[int]], tp: int, pp: int
) -> None:
    flags = ("--model", str(model), "--tp", str(tp), "--pp", str(pp), "--dtype", "float32", "--kv-tokens", "2048")
    with running(*flags, "--threads", "1", environ=QUICK) as system:
        wanted = [
            system.post("/detokenize", {"model": "tiny", "tokens": tokens}).json()["prompt"] for tokens in expected
        ]
        assert texts_of(system) == wanted
        if (tp, pp) != (1, 2):
            return
        tokens: list[str] = []

        def read() -> None:
            prompt = prompt_of(PROMPT_LENS[1])
            for event in system.stream(model="tiny", prompt=prompt, max_tokens=400, ignore_eos=True, temperature=0):
                tokens.extend(choice["text"] for choice in event["choices"])

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            wait_until(lambda: len(tokens) > 10, 60, "a stream", system.describe)
            os.kill(system.log("rank_started")[0]["pid"], signal.SIGKILL)
            reading.result()
        assert "".join(tokens).startswith(wanted[1])
        usage = system.complete(prompt_of(7), model="tiny", max_tokens=400, ignore_eos=True)
        assert "".join(tokens) == usage["choices"][0]["text"]
        assert system.metric("scheduler", "legato_scheduler_workers_lost_total") >= 1
        system.wait_idle()
