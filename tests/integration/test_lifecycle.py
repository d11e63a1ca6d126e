"""Processes that die, pools that are small, workers that are many: the whole system with a tiny model."""

import concurrent.futures
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.system import System, running, wait_until
from tests.integration.tiny import tiny_model
from tests.ports import free_port

QUICK = {"LEGATO_PROFILE_SECONDS": "0.3"}
IDLE_S = 3.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[System]:
    """Two workers and two tokenizers."""
    flags = ("--model", str(model), "--workers", "2", "--tokenizers", "2", "--threads", "1", "--kv-tokens", "2048")
    with running(*flags, environ=QUICK) as system:
        yield system


def complete(system: System, prompt: str, **parameters: object) -> str:
    answer = system.complete(prompt, model="tiny", ignore_eos=True, **parameters)
    return str(answer["choices"][0]["text"])


def test_requests_spread_over_workers_and_tokenizers(pair: System) -> None:
    wait_until(lambda: pair.metric("scheduler", "legato_scheduler_workers") == 2, 60, "both workers", pair.describe)
    prompts = [f"Question {index}" for index in range(12)]
    alone = [complete(pair, prompt, max_tokens=30) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda prompt: complete(pair, prompt, max_tokens=30), prompts))

    assert sum(a == b for a, b in zip(alone, together, strict=True)) >= 11, "one may part at a tie"
    assert len(pair.instances("worker")) == 2
    assert len(pair.instances("tokenizer")) == 2
    pair.wait_idle()


@pytest.mark.parametrize("role", ["worker", "tokenizer", "scheduler", "gateway"])
def test_a_process_that_is_killed_comes_back_and_the_next_request_works(pair: System, role: str) -> None:
    before = pair.instances(role)
    victim = pair.child_pids(role)[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(pair.instances(role)) > len(before), 60, f"a new {role}", pair.describe)
    pair.wait_ready()

    assert complete(pair, "Once more", max_tokens=4)
    assert victim not in pair.child_pids(role)


def test_streams_of_a_killed_worker_go_on_with_no_token_twice_and_none_missing(pair: System) -> None:
    wait_until(lambda: pair.metric("scheduler", "legato_scheduler_workers") == 2, 60, "both workers", pair.describe)
    prompts = [f"Tale {index}" for index in range(4)]
    expected = [complete(pair, prompt, max_tokens=400) for prompt in prompts]
    texts: list[list[str]] = [[] for _ in prompts]

    def read(index: int) -> str:
        finish = ""
        for event in pair.stream(model="tiny", prompt=prompts[index], max_tokens=400, ignore_eos=True, temperature=0):
            for choice in event["choices"]:
                texts[index].append(choice["text"])
                finish = choice["finish_reason"] or finish
        return finish

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(read, index) for index in range(4)]
        wait_until(lambda: all(len(parts) > 20 for parts in texts), 60, "all four to stream")
        os.kill(pair.child_pids("worker")[0], signal.SIGKILL)
        assert [read.result() for read in reads] == ["length"] * 4

    same = sum("".join(parts) == whole for parts, whole in zip(texts, expected, strict=True))
    assert same >= 3, "float32 kernels are not batch-invariant: one may part at a tie"
    # The streams of the killed worker may have ended just before.
    lost = "legato_scheduler_workers_lost_total"
    wait_until(lambda: pair.metric("scheduler", lost) >= 1, 60, "the lost worker to be counted", pair.describe)


def test_a_client_that_leaves_while_its_request_waits_frees_its_place(model: Path) -> None:
    # A device on which a request takes half a minute: it is still at work when somebody looks who waits.
    flags = ("--model", str(model), "--kv-tokens", "1024", "--device", "simulated", "--profile", "a100-llama2-70b-tp4")
    with running(*flags, environ={"LEGATO_MAX_RUNNING": "1"}) as system:
        connections = []
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", system.port, timeout=60)
            body = '{"model": "tiny", "prompt": "a", "max_tokens": 900, "ignore_eos": true, "stream": true}'
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            connections.append(connection)
        waiting = "legato_scheduler_requests_waiting"
        wait_until(lambda: system.metric("scheduler", waiting) == 2, 30, "two to wait", system.describe)
        for connection in connections:
            connection.close()
        system.wait_idle()


def test_a_small_pool_refuses_what_can_never_fit_and_preempts_for_what_can(model: Path) -> None:
    flags = ("--model", str(model), "--kv-tokens", "256", "--threads", "1", "--tbt-target-ms", "500")
    with running(*flags, environ={**QUICK, "LEGATO_OVERCOMMIT": "10"}) as system:
        body = {"model": "tiny", "prompt": [7] * 250, "max_tokens": 10}
        refused = system.post("/v1/completions", body)
        assert refused.status_code == 400
        for number in ("250", "10", "256"):
            assert number in refused.json()["error"]["message"]
        prompts = [f"Prompt {index}" for index in range(4)]
        alone = [complete(system, prompt, max_tokens=100) for prompt in prompts]
        # In one call: each is so short that of several calls the first might be through before the last has come.
        answer = system.complete(prompts, model="tiny", ignore_eos=True, max_tokens=100)
        together = [str(choice["text"]) for choice in answer["choices"]]
        assert sum(a == b for a, b in zip(alone, together, strict=True)) >= 3, "one may part at a tie"
        assert system.metric("scheduler", "legato_scheduler_preemptions_total") >= 1
        system.wait_idle()


@pytest.mark.parametrize("depth", ["1", "2"])
def test_both_plan_depths_serve_the_same_text(model: Path, depth: str, text_by_depth: dict[str, str]) -> None:
    with running("--model", str(model), "--depth", depth, "--kv-tokens", "1024", environ=QUICK) as system:
        text_by_depth[depth] = complete(system, "The same text", max_tokens=40)
    assert len(set(text_by_depth.values())) == 1


@pytest.fixture(scope="module")
def text_by_depth() -> dict[str, str]:
    return {}


def test_an_idle_system_uses_no_cpu_to_speak_of(pair: System) -> None:
    wait_until(lambda: pair.metric("scheduler", "legato_scheduler_workers") == 2, 60, "both workers", pair.describe)
    pair.wait_idle()
    time.sleep(1)  # What has just been served is tidied up.
    before = pair.cpu_seconds()
    time.sleep(IDLE_S)
    used = pair.cpu_seconds() - before
    # Measured: an eighth of that. A process that polls without a pause takes ten times as much.
    assert used < 0.1 * IDLE_S, f"{used:.2f} s of CPU in {IDLE_S:g} s without a request"


def test_a_port_that_is_taken_ends_the_system_with_a_message(model: Path) -> None:
    port = free_port()
    listener = subprocess.Popen([sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"])
    try:
        wait_until(lambda: _answers(port), 20, "the other server to listen")
        result = subprocess.run(
            [sys.executable, "-m", "services.launcher.cli", "up", "--port", str(port), "--model", str(model)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        listener.kill()
        listener.wait()
    assert result.returncode == 1
    assert str(port) in result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere"], ["/nowhere", "smollm2"]),
        (["--workers", "0"], ["--workers", "0"]),
        (["--dtype", "float16"], ["--dtype", "float16"]),
    ],
)
def test_bad_options_end_the_launcher_with_status_2_and_a_message(flags: list[str], words: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "services.launcher.cli", "up", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    for word in words:
        assert word in result.stderr


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
