"""The dashboard's panels, each query asked of a real Prometheus that scrapes a system at work."""

import concurrent.futures
import contextlib
import itertools
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import requests

from tests.gpu_worker.hf import smollm2_or_skip
from tests.integration.prometheus import CONFIG, ROOT, SCRAPE_INTERVAL_S, Prometheus, prometheus_or_skip
from tests.integration.prometheus import running as running_prometheus
from tests.integration.system import HTTP_TIMEOUT_S, System, running, wait_until

DASHBOARD = ROOT / "docker/grafana/dashboards/legato.json"
ROLES = {"gateway": "gateway", "tokenizer": "tokenizer", "scheduler": "scheduler", "gpu-worker": "worker"}
"""Of services in compose.yaml."""
PROFILE = "a100-llama2-70b-tp4"
"""30 ms for a decode, so that a system at work leaves this machine idle."""
TARGET_MS = 80
LONG_PROMPT_LEN = 1000
"""Read before any stream goes on, it stalls them all."""
SETTLE_S = 60.0
"""For the first scrapes, and for a rate of whatever the traffic repeats within seconds."""

ZERO_IN_HEALTH = {
    "legato_gateway_slow_clients_total",
    "legato_links_lost_total",
    "legato_scheduler_preemptions_total",
    "legato_scheduler_recomputed_tokens_total",
    "legato_scheduler_requests_rejected_total",
    "legato_scheduler_requests_waiting",
    "legato_scheduler_workers_lost_total",
    "legato_worker_plans_refused_total",
}
"""What is 0 where nothing goes wrong and nobody waits. Of all else, a panel shows more."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel, as Grafana asks it."""

    panel: str
    expression: str
    legend: str

    def problem(self, prometheus: Prometheus) -> str:
        """Why nobody would see its answer; empty if one would."""
        found = prometheus.query(self.expression)
        if not found:
            return "no data"
        if hidden := [series.labels for series in found if not series.is_drawn]:
            return f"no number for {hidden}"
        for label in re.findall(r"\{\{(\w+)\}\}", self.legend):
            values = {series.labels.get(label, "") for series in found}
            if "" in values or (label == "service" and values != ROLES.keys()):
                return f"{label} is one of {sorted(values)}"
        asked = set(re.findall(r"legato_\w+", self.expression))
        if not any(series.value > 0 for series in found) and not asked & ZERO_IN_HEALTH:
            return f"nothing above 0 in {found}"
        return ""


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """A system that reads prompts first, whatever streams wait, and answers all the time."""
    prometheus_or_skip()
    smollm2_or_skip()
    flags = ("--device", "simulated", "--profile", PROFILE, "--policy", "prefill_first")
    with running(*flags, "--tbt-target-ms", str(TARGET_MS)) as started, traffic(started):
        yield started


@pytest.fixture(scope="module")
def prometheus(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes each of the system's processes."""
    addresses = {service: system.admin_url(role).removeprefix("http://") for service, role in ROLES.items()}
    with running_prometheus(prometheus_or_skip(), addresses, tmp_path_factory.mktemp("prometheus")) as started:
        yield started


def test_prometheus_scrapes_every_process_under_the_name_of_its_service(prometheus: Prometheus) -> None:
    def up() -> dict[str, float]:
        return {series.labels["service"]: series.value for series in prometheus.query('up{job="legato"}')}

    wait_until(lambda: up() == dict.fromkeys(ROLES, 1.0), SETTLE_S, "four targets that are up", lambda: str(up()))


def test_every_query_of_every_panel_returns_what_a_panel_can_show(prometheus: Prometheus) -> None:
    """A stall by a long prompt, refusals and cancellations included; each query is asked until it does."""
    problems = dict.fromkeys(panel_queries(), "not asked")
    assert len(problems) > 40
    deadline = time.monotonic() + SETTLE_S
    while problems and time.monotonic() < deadline:
        problems = {query: problem for query in problems if (problem := query.problem(prometheus))}
        time.sleep(0.2)
    assert not problems, "\n".join(f"{query.panel}: {query.expression}: {why}" for query, why in problems.items())


def test_stalls_are_charged_to_the_prompts_that_made_them(prometheus: Prometheus) -> None:
    expression = 'legato_gateway_stalls_total{cause="prefill_interference"}'
    wait_until(lambda: [found.value > 0 for found in prometheus.query(expression)] == [True], SETTLE_S, "a stall")


def test_a_rate_sees_the_first_refusal_of_its_kind(system: System, prometheus: Prometheus) -> None:
    """A series that came with its first event would begin at 1, and never rise."""
    series = 'legato_gateway_rejections_total{code="invalid_json"}'
    wait_until(lambda: len(prometheus.query(f"{series} offset 2s")) == 1, SETTLE_S, "the series")
    headers = {"Content-Type": "application/json"}
    answer = requests.post(f"{system.url}/v1/completions", data="{", headers=headers, timeout=HTTP_TIMEOUT_S)
    assert answer.status_code == 400
    wait_until(
        lambda: [found.value > 0 for found in prometheus.query(f"increase({series}[5m])")] == [True],
        SETTLE_S,
        "an increase",
    )


def test_promtool_finds_nothing_wrong_with_the_configuration() -> None:
    command = [prometheus_or_skip("promtool"), "check", "config", "--lint-fatal", str(CONFIG)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def panel_queries() -> list[Query]:
    """All queries, their variables replaced by what Grafana would for a window with a point a scrape."""
    queries = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", f"{4 * SCRAPE_INTERVAL_S}s")
            assert "$" not in expression, f"{panel['title']} has a variable that this test does not know"
            queries.append(Query(panel["title"], expression, target["legendFormat"]))
    return queries


@contextlib.contextmanager
def traffic(system: System) -> Iterator[None]:
    """Until the block ends: streams that take a second or two, one that is left early, long prompts, a wrong model."""
    stop = threading.Event()

    def stream(num_tokens: int) -> None:
        for _ in system.stream(prompt="Once upon a time there was " * 8, max_tokens=num_tokens, ignore_eos=True):
            if stop.is_set():
                return

    def leave_early() -> None:
        with contextlib.closing(system.stream(prompt="Hello", max_tokens=1000, ignore_eos=True)) as events:
            next(events)

    def read_a_long_prompt(first_token: int) -> None:
        body = {"model": "smollm2", "prompt": [first_token] * LONG_PROMPT_LEN, "max_tokens": 1}
        assert requests.post(f"{system.url}/v1/completions", json=body, timeout=HTTP_TIMEOUT_S).status_code == 200

    def ask_for_a_wrong_model() -> None:
        body = {"model": "no-such-model", "prompt": "Hello"}
        assert requests.post(f"{system.url}/v1/completions", json=body, timeout=HTTP_TIMEOUT_S).status_code == 404

    def watch() -> None:
        while not stop.is_set():
            stream(40)

    def disturb() -> None:
        for index in itertools.count(100):
            if stop.wait(0.5):
                return
            read_a_long_prompt(index)
            leave_early()
            ask_for_a_wrong_model()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        at_work = [pool.submit(work) for work in (watch, watch, disturb)]
        try:
            yield
        finally:
            stop.set()
    for work in at_work:
        work.result()
