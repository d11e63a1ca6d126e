"""`docker compose up` on this machine's engine: comes up, streams, scales, loses a worker, comes down."""

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.integration.system import wait_until
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
ENGINE_TIMEOUT_S = 10.0
BUILD_TIMEOUT_S = 1200.0
COMMAND_TIMEOUT_S = 180.0
READY_TIMEOUT_S = 180.0
STREAM_TIMEOUT_S = 180.0
NUM_STREAMS = 8
NUM_TOKENS = 48
PROMPTS = [f"Stream number {index} tells a story about" for index in range(NUM_STREAMS)]

pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S + 2 * READY_TIMEOUT_S)


class Compose:
    """compose.yaml as a project of its own, on a port of its own, so that it disturbs none that runs already."""

    def __init__(self) -> None:
        self.project = f"legato-test-{os.getpid()}"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._environ = {
            **os.environ,
            "LEGATO_PUBLISH": f"127.0.0.1:{port}",
            # Texts are compared, and in float32 few candidates are as good as tied.
            "LEGATO_DTYPE": "float32",
            "LEGATO_KV_TOKENS": "8192",
            "LEGATO_THREADS": "1",
            # A machine that runs other tests, too, may take longer than the default for the rest of eight streams.
            "LEGATO_DRAIN_S": "120",
            "LEGATO_STOP_GRACE_PERIOD": "145s",
        }
        has_plugin = shutil.which("docker") and _run(["docker", "compose", "version"], check=False).returncode == 0
        self._command = ["docker", "compose"] if has_plugin else ["docker-compose"]

    def __call__(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a command of compose; what it printed.

        Raises:
            AssertionError: If it fails, with what it said.
        """
        command = [*self._command, "--project-name", self.project, *arguments]
        return _run(command, timeout_s=timeout_s, env=self._environ).stdout

    def containers(self, service: str = "", *, is_running: bool = True) -> list[str]:
        """Ids of the project's containers, oldest first."""
        filters = [f"label=com.docker.compose.project={self.project}"]
        filters += [f"label=com.docker.compose.service={service}"] if service else []
        filters += ["status=running"] if is_running else []
        flags = [part for each in filters for part in ("--filter", each)]
        return _run(["docker", "ps", "--all", "--quiet", *flags]).stdout.split()[::-1]

    def metric(self, container: str, name: str) -> float:
        """A metric without labels, read inside the container: admin ports are not published."""
        script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
        text = _run(["docker", "exec", container, "python", "-c", script]).stdout
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found.group(1))

    def logs(self) -> str:
        return self("logs", "--no-color", "--tail", "60")

    def wait_ready(self) -> None:
        wait_until(lambda: self.readiness() == 200, READY_TIMEOUT_S, "the gateway to be ready", self.logs)

    def readiness(self) -> int:
        """The status of /health/ready at the published port; 0 if nothing answers there."""
        try:
            return requests.get(f"{self.url}/health/ready", timeout=5).status_code
        except requests.RequestException:
            return 0


class Streams:
    """One greedy stream for each of PROMPTS, read at the published port by threads."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.texts = [""] * NUM_STREAMS
        self.num_events = [0] * NUM_STREAMS
        self.ends: list[Any] = [None] * NUM_STREAMS  # finish reason and number of output tokens
        self._threads = [threading.Thread(target=self._read, args=(index,)) for index in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def wait_running(self) -> "Streams":
        wait_until(lambda: min(self.num_events) >= 3, STREAM_TIMEOUT_S, "every stream to run")
        return self

    @property
    def num_running(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def check(self, expected: list[str]) -> None:
        """Each ended as it should, and said what it says undisturbed."""
        for thread in self._threads:
            thread.join(STREAM_TIMEOUT_S)
        assert self.ends == [("length", NUM_TOKENS)] * NUM_STREAMS
        num_same = sum(text == other for text, other in zip(self.texts, expected, strict=True))
        # Where kernels are not batch-invariant, two candidates that are as good as tied may swap (DESIGN section 1).
        print(f"{num_same} of {NUM_STREAMS} texts equal the undisturbed ones to the byte")
        assert num_same >= NUM_STREAMS - 2

    def _read(self, index: int) -> None:
        body = request_body(PROMPTS[index]) | {"stream": True, "stream_options": {"include_usage": True}}
        reason = None
        with requests.post(f"{self._url}/v1/completions", json=body, stream=True, timeout=STREAM_TIMEOUT_S) as answer:
            for line in answer.iter_lines(chunk_size=1):
                if line == b"data: [DONE]":
                    return
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                for choice in event.get("choices", ()):
                    self.texts[index] += choice["text"]
                    self.num_events[index] += 1
                    reason = choice["finish_reason"] or reason
                if usage := event.get("usage"):
                    self.ends[index] = (reason, usage["completion_tokens"])


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    """The system, built and up; it is gone afterwards, whatever happened."""
    skip_without_engine()
    compose = Compose()
    compose("build", timeout_s=BUILD_TIMEOUT_S)
    try:
        compose("up", "--detach")
        compose.wait_ready()
        yield compose
    finally:
        compose("down", "--volumes", "--remove-orphans", "--timeout", "5")


@pytest.fixture(scope="module")
def undisturbed(compose: Compose) -> list[str]:
    """What each prompt is answered with, one at a time."""
    texts = []
    for prompt in PROMPTS:
        answer = requests.post(f"{compose.url}/v1/completions", json=request_body(prompt), timeout=STREAM_TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
    return texts


def test_it_comes_up_and_streams_through_the_published_port(compose: Compose, undisturbed: list[str]) -> None:
    Streams(compose.url).check(undisturbed)


def test_the_containers_are_healthy_and_neither_root_nor_able_to_write_to_their_images(compose: Compose) -> None:
    for service in ("gateway", "tokenizer", "scheduler", "gpu-worker"):
        (container,) = compose.containers(service)
        wait_until(lambda: health_of(container) == "healthy", 60, f"{service} to be healthy", compose.logs)  # noqa: B023
        assert _run(["docker", "exec", container, "id", "-u"]).stdout.strip() != "0"
        touched = _run(["docker", "exec", container, "touch", "/opt/legato/x"], check=False)
        assert "Read-only file system" in touched.stderr


def test_only_the_worker_has_torch(compose: Compose) -> None:
    for service in ("gateway", "tokenizer", "scheduler"):
        (container,) = compose.containers(service)
        imported = _run(["docker", "exec", container, "python", "-c", "import torch"], check=False)
        assert "No module named 'torch'" in imported.stderr


def test_workers_and_tokenizers_join_while_streams_run_and_no_token_is_lost_or_doubled(
    compose: Compose, undisturbed: list[str]
) -> None:
    streams = Streams(compose.url).wait_running()
    scale_up(compose)
    streams.check(undisturbed)

    (scheduler,) = compose.containers("scheduler")
    wait_until(
        lambda: compose.metric(scheduler, "legato_scheduler_workers") == 3,
        READY_TIMEOUT_S,
        "three workers to join",
        compose.logs,
    )
    wait_until(
        lambda: compose("logs", "--no-color", "gateway").count("tokenizer_connected") >= 2,
        30,
        "the gateway to find the second tokenizer by its name",
        compose.logs,
    )
    Streams(compose.url).check(undisturbed)
    for service, metric in (
        ("gpu-worker", "legato_worker_iterations_total"),
        ("tokenizer", "legato_tokenizer_output_tokens_total"),
    ):
        counts = [compose.metric(container, metric) for container in compose.containers(service)]
        assert all(counts), f"work went round every {service}: {counts}"


def test_a_killed_worker_takes_no_stream_with_it(compose: Compose, undisturbed: list[str]) -> None:
    scale_up(compose)
    (scheduler,) = compose.containers("scheduler")
    wait_until(lambda: compose.metric(scheduler, "legato_scheduler_workers") == 3, READY_TIMEOUT_S, "three workers")
    streams = Streams(compose.url).wait_running()
    busiest = max(compose.containers("gpu-worker"), key=lambda each: compose.metric(each, "legato_worker_slots_in_use"))
    num_resident = compose.metric(busiest, "legato_worker_slots_in_use")
    num_running = streams.num_running

    _run(["docker", "kill", "--signal", "KILL", busiest])

    streams.check(undisturbed)
    print(f"killed a worker that held {num_resident:g} of {num_running} streams")
    assert num_resident > 0
    wait_until(lambda: compose.metric(scheduler, "legato_scheduler_workers") == 2, 30, "the scheduler to have noticed")


def test_stopping_lets_streams_finish_and_leaves_nothing_behind(compose: Compose, undisturbed: list[str]) -> None:
    streams = Streams(compose.url).wait_running()
    compose("stop")
    streams.check(undisturbed)

    stopped = {
        service: compose.containers(service, is_running=False) for service in ("gateway", "tokenizer", "scheduler")
    }
    for service, containers in stopped.items():
        statuses = [_inspect(container, "{{.State.ExitCode}}") for container in containers]
        assert set(statuses) == {"0"}, f"{service}: {statuses}\n{compose.logs()}"
    compose("down", "--volumes", "--timeout", "5")
    assert compose.containers(is_running=False) == []
    assert _run(["docker", "volume", "ls", "--quiet", "--filter", f"name={compose.project}"]).stdout == ""


def request_body(prompt: str) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


def scale_up(compose: Compose) -> None:
    compose("up", "--detach", "--no-recreate", "--scale", "gpu-worker=3", "--scale", "tokenizer=2")


def skip_without_engine() -> None:
    try:
        done = _run(["docker", "info"], timeout_s=ENGINE_TIMEOUT_S, check=False)
    except FileNotFoundError:
        pytest.skip("no Docker engine: there is no `docker` here")
    except subprocess.TimeoutExpired:
        pytest.skip(f"no Docker engine: `docker info` did not answer within {ENGINE_TIMEOUT_S:g} s")
    if done.returncode != 0:
        pytest.skip(f"no Docker engine: {done.stderr.strip().splitlines()[-1]}")


def health_of(container: str) -> str:
    return _inspect(container, "{{.State.Health.Status}}")


def _inspect(container: str, template: str) -> str:
    return _run(["docker", "inspect", "--format", template, container]).stdout.strip()


def _run(
    command: list[str], *, timeout_s: float = COMMAND_TIMEOUT_S, check: bool = True, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    if check:
        assert done.returncode == 0, (
            f"{' '.join(command)}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done
