"""Each process started by itself, with keys on every link and options from a file: as on several machines."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import requests

from tests.integration.system import wait_until
from tests.integration.tiny import tiny_model
from tests.ports import free_port


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("alone")
    model = tiny_model(folder)
    subprocess.run([*legato("keys", "new"), str(folder / "ring.toml")], check=True)
    scheduler, tokenizers, port = free_port(), [free_port(), free_port()], free_port()
    (folder / "legato.toml").write_text(
        f"""
[scheduler]
bind = "tcp://127.0.0.1:{scheduler}"
tbt_target_ms = 200
fits = "{folder}/fits"

[tokenizer]
scheduler = "tcp://127.0.0.1:{scheduler}"
model = "{model}"

[worker]
scheduler = "tcp://127.0.0.1:{scheduler}"
model = "{model}"
served_model_name = "noise"
profile_seconds = 0.3
kv_tokens = 2048
threads = 1

[gateway]
port = {port}
tokenizers = ["tcp://127.0.0.1:{tokenizers[0]}", "tcp://127.0.0.1:{tokenizers[1]}"]
api_keys = ["secret"]
"""
    )
    commands = [
        ("gateway",),
        ("worker",),
        *(("tokenizer", "--bind", f"tcp://127.0.0.1:{tokenizer}") for tokenizer in tokenizers),
        ("scheduler",),  # Last: whoever dials it waits.
    ]
    environ = {**os.environ, "LEGATO_CONFIG": str(folder / "legato.toml"), "LEGATO_KEYS": str(folder / "ring.toml")}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(legato(*command), env=environ, stderr=subprocess.DEVNULL))
            for command in commands
        ]
        for process in processes:
            stack.callback(process.kill)
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url), 180, "the system to be ready")
        yield url
        for process in processes:
            process.terminate()
        assert [process.wait(60) for process in processes] == [0] * len(processes)


def legato(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.launcher.cli", *arguments]


def is_ready(url: str) -> bool:
    with contextlib.suppress(requests.RequestException):
        return requests.get(f"{url}/health/ready", timeout=5).status_code == 200
    return False


def test_processes_started_alone_with_keys_serve_under_the_name_that_the_worker_was_given(url: str) -> None:
    body = {"model": "noise", "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
    for _ in range(4):  # Both tokenizers get some.
        response = requests.post(
            f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer secret"}, timeout=60
        )
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 5


def test_every_route_but_health_asks_for_the_key(url: str) -> None:
    assert requests.post(f"{url}/v1/completions", json={}, timeout=60).status_code == 401
    for path in ("/v1/models", "/metrics"):
        assert requests.get(url + path, timeout=60).status_code == 401
    assert requests.get(f"{url}/health/live", timeout=60).status_code == 200
