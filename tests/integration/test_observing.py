"""What an operator sees of a running system: its metrics, its budget explained, the console, a recording."""

import asyncio
import base64
import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import requests

from common.account import Cause
from common.messages.requests import FinishReason, RejectReason
from services.gateway.errors import ErrorCode
from services.scheduler.recording import replay
from tests.gpu_worker.hf import smollm2_or_skip
from tests.integration.browser import chromium_or_skip, page_of
from tests.integration.browser import running as running_chromium
from tests.integration.system import HTTP_TIMEOUT_S, System, running, wait_until

ROOT = Path(__file__).parents[2]
KEY = "sesame"
ROLES = ("gateway", "tokenizer", "scheduler", "worker")
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def observed(recordings: Path) -> Iterator[System]:
    """A simulated system that asks for an API key."""
    smollm2_or_skip()
    environ = {"LEGATO_API_KEYS": KEY, "LEGATO_RECORDINGS": str(recordings)}
    with running("--device", "simulated", "--profile", "h200-smollm2", environ=environ) as system:
        yield system


@contextlib.contextmanager
def streaming(system: System, num_streams: int = 3) -> Iterator[None]:
    """Streams that go on until the block ends. Each has had text when it begins: the gateway knows that they run. They
    take many seconds: a reader whom a busy machine holds up is not left with what a stream said that is over."""
    stop = threading.Event()
    have_text = [threading.Event() for _ in range(num_streams)]

    def stream(index: int) -> None:
        while not stop.is_set():
            body = {"model": "smollm2", "prompt": f"{index} " * 40, "max_tokens": 8000, "stream": True}
            with requests.post(
                f"{system.url}/v1/completions", json=body, headers=AUTHORIZED, stream=True, timeout=HTTP_TIMEOUT_S
            ) as answer:
                for line in answer.iter_lines(chunk_size=None):  # As it comes.
                    if line.startswith(b"data: "):
                        have_text[index].set()
                    if stop.is_set():
                        break

    threads = [threading.Thread(target=stream, args=(index,)) for index in range(num_streams)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: all(event.is_set() for event in have_text), 60, "streams")
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def scraped(system: System, role: str) -> str:
    return requests.get(f"{system.admin_url(role)}/metrics", timeout=HTTP_TIMEOUT_S).text


def test_every_panel_asks_for_metrics_that_a_running_process_serves(observed: System) -> None:
    with streaming(observed):
        served = "\n".join(scraped(observed, role) for role in ROLES)
    names = set(re.findall(r"^# TYPE (legato_\w+) ", served, re.MULTILINE))
    names |= set(re.findall(r"^(legato_\w+)", served, re.MULTILINE))
    # Series with labels appear with their first event; their families are there from the start.
    names |= {f"{name}_total" for name in names}
    dashboard = json.loads((ROOT / "docker/grafana/dashboards/legato.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"legato_\w+", query)}
    assert len(asked) > 30
    assert asked - names == set()


@pytest.mark.parametrize(
    ("role", "series", "values"),
    [
        ("gateway", "legato_gateway_rejections_total{code=", get_args(ErrorCode)),
        ("gateway", "legato_gateway_stalls_total{cause=", Cause),
        ("scheduler", "legato_scheduler_requests_ended_total{reason=", FinishReason),
        ("scheduler", "legato_scheduler_requests_rejected_total{reason=", RejectReason),
        ("gateway", "legato_links_lost_total{peer_role=", ("tokenizer",)),
        ("tokenizer", "legato_links_lost_total{peer_role=", ("gateway", "scheduler")),
        ("scheduler", "legato_links_lost_total{peer_role=", ("tokenizer", "worker")),
        ("worker", "legato_links_lost_total{peer_role=", ("scheduler",)),
    ],
)
def test_what_may_happen_has_a_series_before_it_does(
    observed: System, role: str, series: str, values: Iterable[str]
) -> None:
    """Else the first event would not be seen: a series that begins at 1 has not risen."""
    text = scraped(observed, role)
    assert [value for value in values if f'\n{series}"{value}"}} ' not in text] == []


@pytest.mark.parametrize("role", ROLES)
def test_promtool_finds_nothing_wrong(observed: System, role: str) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    text = scraped(observed, role)
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_gauges_are_right_after_aborts_and_a_wrong_model_mints_no_series(observed: System) -> None:
    with streaming(observed):
        wait_until(lambda: observed.metric("gateway", "legato_gateway_open_requests") > 0, 60, "open requests")
        assert observed.metric("scheduler", "legato_scheduler_token_budget") > 0
    observed.wait_idle()
    wait_until(lambda: observed.metric("gateway", "legato_gateway_open_requests") == 0, 30, "an idle gateway")
    assert observed.metric("gateway", "legato_gateway_cancellations_total") >= 3
    assert observed.metric("gateway", "legato_gateway_max_token_gap_seconds_count") >= 3
    assert observed.metric("scheduler", "legato_scheduler_prompt_tokens_total") > 0
    assert observed.metric("scheduler", "legato_scheduler_gaps_total") > 0
    before = len(re.findall(r"^legato", scraped(observed, "gateway"), re.MULTILINE))
    for index in range(3):
        body = {"model": f"no-such-model-{index}", "prompt": "x"}
        answer = requests.post(f"{observed.url}/v1/completions", json=body, headers=AUTHORIZED, timeout=HTTP_TIMEOUT_S)
        assert answer.status_code == 404
    text = scraped(observed, "gateway")
    assert "no-such-model" not in text
    assert 'legato_gateway_rejections_total{code="model_not_found"} 3.0' in text
    # One of the status, with the moment of its making; codes are there from the start, and no name becomes one.
    assert len(re.findall(r"^legato", text, re.MULTILINE)) - before <= 2


def test_explain_names_the_stream_and_the_term_that_set_the_budget(observed: System) -> None:
    told = ""

    def tells_of_a_stream() -> bool:
        """Between two requests of each reader there may be a moment without any."""
        nonlocal told
        told = explained(observed)
        return "tightest stream" in told

    with streaming(observed):
        wait_until(tells_of_a_stream, HTTP_TIMEOUT_S, "a stream to be explained")
    assert re.search(r"worker-\w+: \d+ tokens, as many as ", told), told
    assert re.search(r"tightest stream cmpl-\w+-0: target 100 ms", told), told
    assert re.search(r"another token would cost most in: \w+", told), told
    observed.wait_idle()
    assert "tightest" not in explained(observed)


def test_explain_says_whom_it_could_not_ask() -> None:
    command = [sys.executable, "-m", "services.launcher.cli", "explain", "--admin", "http://127.0.0.1:1"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert asked.returncode == 1
    assert "http://127.0.0.1:1 is no scheduler" in asked.stderr


@pytest.mark.parametrize("path", ["/console", "/console/feed"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}])
def test_the_console_is_guarded_by_the_key(observed: System, path: str, headers: dict[str, str]) -> None:
    answer = requests.get(observed.url + path, headers=headers, timeout=HTTP_TIMEOUT_S)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Basic ")


def test_the_feed_tells_iterations_streams_and_budget(observed: System) -> None:
    with streaming(observed):
        gateway, pool = fed(observed)
    assert gateway["num_open"] == len(gateway["streams"]) > 0
    running_ones = [stream for stream in gateway["streams"] if stream["phase"] == "running"]
    assert running_ones
    assert all(stream["max_gap_ms"] >= stream["last_gap_ms"] for stream in running_ones if stream["last_gap_ms"])
    (worker,) = pool["workers"]
    assert worker["num_running"] > 0
    assert worker["budget"]["token_budget"] > worker["budget"]["num_decodes"] > 0
    assert any(iteration["num_decodes"] for iteration in pool["iterations"])
    assert all(iteration["worker_id"] == worker["worker_id"] for iteration in pool["iterations"])


def test_the_console_follows_in_a_browser(observed: System) -> None:
    chromium = chromium_or_skip()
    password = base64.b64encode(f"any:{KEY}".encode()).decode()

    async def look(port: int, *, width: int) -> list[str]:
        async with page_of(port) as page:
            await page.send_with_all({"Authorization": f"Basic {password}"})
            await page.open(f"{observed.url}/console", width=width)
            await page.wait_for("document.getElementById('state').textContent === 'live'")
            await page.wait_for("document.querySelectorAll('#streams tr').length === 3")
            await page.wait_for("document.getElementById('why').textContent.includes('leaves the least time')")
            # Drawn: the canvas holds more than one colour.
            await page.wait_for(
                "new Set(new Uint32Array(document.getElementById('timeline').getContext('2d')"
                ".getImageData(0, 0, 300, 200).data.buffer)).size > 3"
            )
            assert await page.value("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
            return page.problems

    with streaming(observed), running_chromium(chromium) as port:
        assert asyncio.run(look(port, width=1280)) == []
        assert asyncio.run(look(port, width=400)) == []


def test_what_the_system_did_replays(observed: System, recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with streaming(observed):
        pass
    observed.wait_idle()
    assert replay.main([str(recordings)]) == 0
    assert "all equal" in capsys.readouterr().out


def explained(system: System) -> str:
    command = [sys.executable, "-m", "services.launcher.cli", "explain", "--admin", system.admin_url("scheduler")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def fed(system: System) -> tuple[dict[str, Any], dict[str, Any]]:
    """An event of the gateway that has a running stream, and then one of the scheduler at work on such. Between two
    requests of each reader there may be a moment without any."""
    gateway: dict[str, Any] | None = None
    with requests.get(f"{system.url}/console/feed", headers=AUTHORIZED, stream=True, timeout=HTTP_TIMEOUT_S) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        name = ""
        for line in answer.iter_lines():
            if line.startswith(b"event: "):
                name = line[7:].decode()
            elif line.startswith(b"data: "):
                told: dict[str, Any] = json.loads(line[6:])
                if name == "gateway" and any(stream["phase"] == "running" for stream in told["streams"]):
                    gateway = told
                elif name == "pool-0" and gateway is not None and is_at_work(told):
                    return gateway, told
    raise AssertionError("the feed has ended")


def is_at_work(pool: dict[str, Any]) -> bool:
    """Whether streams run, and have run since the last event."""
    return bool(pool["workers"][0]["num_running"]) and any(done["num_decodes"] for done in pool["iterations"])
