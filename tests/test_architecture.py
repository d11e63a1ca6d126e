"""The arrows between packages, read off the imports of every file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("common", "services", "gpu_worker", "loadtest")
SERVICES = ("gateway", "tokenizer", "scheduler")


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def violations(is_inside: str, forbidden: tuple[str, ...], allowed_files: tuple[str, ...] = ()) -> list[str]:
    """Imports of forbidden modules (or below them) in files below a folder."""
    found = []
    for path in sources():
        name = str(path.relative_to(ROOT))
        if not name.startswith(is_inside) or name in allowed_files:
            continue
        found += [
            f"{name} imports {module}"
            for module in sorted(imports_of(path))
            if any(module == root or module.startswith(f"{root}.") for root in forbidden)
        ]
    return found


def test_common_stands_on_nothing_of_ours() -> None:
    assert violations("common/", ("services", "gpu_worker", "loadtest")) == []


@pytest.mark.parametrize("service", SERVICES)
def test_services_do_not_import_each_other(service: str) -> None:
    others = tuple(f"services.{other}" for other in (*SERVICES, "launcher") if other != service)
    assert violations(f"services/{service}/", (*others, "gpu_worker")) == []


def test_the_worker_imports_no_service() -> None:
    assert violations("gpu_worker/", ("services", "loadtest")) == []


def test_zmq_is_touched_by_the_links_alone() -> None:
    assert violations("", ("zmq",), allowed_files=("common/wire/zmq_link.py", "common/wire/zmq_socket.py")) == []


def test_bytes_are_packed_in_one_module() -> None:
    assert violations("", ("msgpack",), allowed_files=("common/wire/codec.py",)) == []


def test_torch_lives_in_the_worker_alone() -> None:
    assert violations("common/", ("torch",)) == []
    assert violations("services/", ("torch",)) == []
    assert violations("loadtest/", ("torch",)) == []


def test_pydantic_lives_at_the_http_edge_alone() -> None:
    for package in ("common/", "gpu_worker/", "services/tokenizer/", "services/scheduler/"):
        assert violations(package, ("pydantic",)) == []


def test_nothing_is_pickled() -> None:
    assert violations("", ("pickle", "cloudpickle", "dill", "shelve")) == []


@pytest.mark.parametrize(
    "core",
    [
        "services/scheduler/core.py",
        "services/tokenizer/core.py",
        "services/gateway/core.py",
        "services/gateway/calls.py",
    ],
)
def test_cores_touch_no_clock_socket_or_log(core: str) -> None:
    assert (ROOT / core).is_file()
    impure = ("asyncio", "time", "random", "socket", "structlog", "logging", "zmq", "aiohttp", "common.clock")
    assert violations(core, impure) == []
