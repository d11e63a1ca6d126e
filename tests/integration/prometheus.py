"""Debian's Prometheus, with docker/prometheus.yml as its configuration but for the addresses of what it scrapes."""

import contextlib
import math
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.integration.system import wait_until
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "docker/prometheus.yml"
SCRAPE_INTERVAL_S = 1
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
HTTP_TIMEOUT_S = 30.0


def prometheus_or_skip(program: str = "prometheus") -> str:
    """Return where the program, or another of Debian's package, is; skip the test where it is not installed."""
    if (path := shutil.which(program)) is None:
        pytest.skip(f"no {program} on this machine: apt-get install prometheus")
    return path


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an instant query's result."""

    labels: dict[str, str]
    value: float

    @property
    def is_drawn(self) -> bool:
        """Whether Grafana draws it: 0/0 is data to Prometheus, and nothing in a panel."""
        return math.isfinite(self.value)


class Prometheus:
    """A Prometheus that runs."""

    def __init__(self, url: str) -> None:
        self._url = url

    def is_ready(self) -> bool:
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(f"{self._url}/-/ready", timeout=HTTP_TIMEOUT_S).status_code == 200
        return False

    def query(self, expression: str) -> list[Series]:
        """What the expression is now.

        Raises:
            AssertionError: If Prometheus does not understand it, with what it says.
        """
        answer = requests.post(f"{self._url}/api/v1/query", data={"query": expression}, timeout=HTTP_TIMEOUT_S)
        told: dict[str, Any] = answer.json()
        assert told["status"] == "success", f"{expression}: {told}"
        assert told["data"]["resultType"] == "vector", f"{expression}: {told}"
        return [Series(found["metric"], float(found["value"][1])) for found in told["data"]["result"]]


@contextlib.contextmanager
def running(path: str, addresses: Mapping[str, str], directory: Path) -> Iterator[Prometheus]:
    """A Prometheus that is ready, and ends with the block.

    Args:
        path: Of the program.
        addresses: Of admin ports, as host:port, by the name that their service has in compose.yaml.
        directory: Empty, for its files.
    """
    (directory / "prometheus.yml").write_text(_config(addresses))
    address = f"127.0.0.1:{free_port()}"
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                path,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            stdout=output,
            stderr=output,
        )
    prometheus = Prometheus(f"http://{address}")

    def is_ready() -> bool:
        assert process.poll() is None, f"prometheus ended with {process.returncode}: {log.read_text()}"
        return prometheus.is_ready()

    try:
        wait_until(is_ready, START_TIMEOUT_S, "Prometheus to be ready", log.read_text)
        yield prometheus
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()


def _config(addresses: Mapping[str, str]) -> str:
    """Our configuration, with addresses in place of names that only Compose's network knows. The names stay, as the
    label that DNS would have given, so that what is made of it is as in production."""
    before, name, rest = CONFIG.read_text().partition("    dns_sd_configs:\n")
    assert name, f"{CONFIG} finds its targets in another way"
    _, name, after = rest.partition("    relabel_configs:\n")
    assert name, f"{CONFIG} does not label its targets"
    targets = "".join(
        f"      - targets: ['{address}']\n        labels: {{__meta_dns_name: {service}}}\n"
        for service, address in addresses.items()
    )
    for setting, ours in (("scrape_interval: 5s", SCRAPE_INTERVAL_S), ("scrape_timeout: 4s", SCRAPE_INTERVAL_S)):
        assert before.count(setting) == 1, f"{CONFIG} has no {setting}"
        before = before.replace(setting, f"{setting.partition(':')[0]}: {ours}s")
    return f"{before}    static_configs:\n{targets}{name}{after}"
