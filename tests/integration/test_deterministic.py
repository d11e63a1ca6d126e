"""`--deterministic` through the whole system: what a client reads is the same to the byte, whatever happens to it."""

import concurrent.futures
from pathlib import Path

from tests.integration.system import System, running
from tests.integration.tiny import tiny_model

FLAGS = ("--deterministic", "true", "--kernels", "portable", "--threads", "2", "--kv-tokens", "320")
NUM_OUTPUT_TOKENS = 110
PROMPT_LENS = (3, 40, 90, 130)
MAX_ROUNDS = 12
"""Who gives way when is a matter of who arrives when; in most rounds somebody does with half its output out."""


def test_preemption_neighbours_and_chunks_change_no_byte_of_a_deterministic_system(tmp_path: Path) -> None:
    # No request fills the pool alone; together they need more than twice of it. Chunks are as small as the budget.
    flags = ("--model", str(tiny_model(tmp_path)), *FLAGS, "--token-budget", "24")
    environ = {"LEGATO_PROFILE_SECONDS": "0.3", "LEGATO_OVERCOMMIT": "10", "LEGATO_PREFIX_CACHE": "false"}
    with running(*flags, environ=environ) as system:
        alone = [texts_of(system, index) for index in range(len(PROMPT_LENS))]
        with concurrent.futures.ThreadPoolExecutor(len(PROMPT_LENS)) as pool:
            for _ in range(MAX_ROUNDS):
                together = list(pool.map(lambda index: texts_of(system, index), range(len(PROMPT_LENS))))
                assert together == alone
                if was_preempted_half_way(system):
                    break
        assert len({text for texts in alone for text in texts}) == 2 * len(PROMPT_LENS), (
            "texts that tell requests apart"
        )
        assert was_preempted_half_way(system)
        assert [line["instruction_set"] for line in system.log("kernels_loaded")] == ["portable"]


def was_preempted_half_way(system: System) -> bool:
    """Whether a request gave way when part of its output was out."""
    return any(line["num_tokens"] > max(PROMPT_LENS) for line in system.log("request_preempted"))


def texts_of(system: System, index: int) -> list[str]:
    """The greedy continuation of a prompt of its own, and a drawn one."""
    prompt = [(7 * index + 11 * place) % 1000 + 100 for place in range(PROMPT_LENS[index])]
    answers = [
        system.complete(
            prompt, model="tiny", ignore_eos=True, max_tokens=NUM_OUTPUT_TOKENS, temperature=temperature, seed=index
        )
        for temperature in (0.0, 1.0)
    ]
    return [str(answer["choices"][0]["text"]) for answer in answers]
