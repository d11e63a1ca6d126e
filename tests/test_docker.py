"""What the files in docker/ promise, as far as it can be said without an engine."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from prometheus_client import REGISTRY, CollectorRegistry

from gpu_worker import metrics as worker_metrics
from services.gateway.account import StallCounts
from services.gateway.metrics import GatewayMetrics
from services.scheduler import metrics as scheduler_metrics
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import SchedulerCore
from services.scheduler.metrics import CoreCollector
from services.tokenizer import shell as tokenizer_shell

ROOT = Path(__file__).parent.parent


def test_every_panel_of_the_dashboard_asks_for_metrics_that_some_process_has() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry).count_stalls(StallCounts())
    registry.register(CoreCollector(SchedulerCore(SchedulerConfig().limits())))
    # The other processes' metrics are in the default registry as soon as their modules are imported.
    assert all((scheduler_metrics, tokenizer_shell, worker_metrics))
    known = {
        family.name + suffix
        for family in (*registry.collect(), *REGISTRY.collect())
        for suffix in {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
    }
    dashboard = json.loads((ROOT / "docker/grafana/dashboards/legato.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"legato_\w+", query)}
    assert len(asked) > 15
    assert asked - known == set()


def test_grafana_knows_how_often_prometheus_scrapes() -> None:
    """Its $__rate_interval is four times that; with less, a rate has too few points, and a panel no data."""
    source = (ROOT / "docker/grafana/provisioning/datasources/legato.yaml").read_text()
    (scraped,) = re.findall(r"scrape_interval: (\w+)", (ROOT / "docker/prometheus.yml").read_text())
    assert re.findall(r"timeInterval: (\w+)", source) == [scraped]


@pytest.mark.parametrize("role", ["gateway", "tokenizer", "scheduler", "worker.cpu"])
def test_the_images_share_the_layer_with_our_code(role: str) -> None:
    """As text: stages that differ in nothing are built once."""
    stages = [dockerfile(name).split("\nFROM ") for name in (role, "gateway")]
    code, other = (next(stage for stage in each if " AS code\n" in stage) for each in stages)
    assert code.partition("\n\n")[0] == other.partition("\n\n")[0]
    assert "USER legato" in dockerfile(role)


def test_whatever_the_images_install_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.split("==") for line in (ROOT / "docker/constraints.txt").read_text().splitlines() if line[:1].isalpha()
    )
    extras = project["optional-dependencies"]
    for text in (
        *project["dependencies"],
        *(requirement for extra in ("gateway", "tokenizer", "tracing", "worker") for requirement in extras[extra]),
    ):
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def dockerfile(role: str) -> str:
    return (ROOT / f"docker/{role}.Dockerfile").read_text()
