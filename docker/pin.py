"""Prints what docker/constraints.txt holds: the releases that the images install, as this environment has them.

    .venv/bin/python docker/pin.py > docker/constraints.txt

The closure of what the roles need, and nothing of the development tools beside it.
"""

import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
EXTRAS = ("gateway", "tokenizer", "worker", "tracing")
"""What the images install beside the dependencies that every process has. flash-attn, which needs a CUDA machine, is
pinned by pyproject.toml's own bounds."""
BUILD_TOOLS = ("setuptools",)


def main() -> None:
    print(
        "# Written by docker/pin.py from the environment that the tests run in. `pip install` in every image obeys it."
    )
    for name in sorted(closure()):
        # Without the local part, +cpu: the CUDA image takes another build of the same release.
        print(f"{name}=={distribution(name).version.partition('+')[0]}")


def closure() -> set[str]:
    """Names of all distributions that the images need, here on Linux."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    wanted = [*BUILD_TOOLS, *project["dependencies"]]
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    found: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate()):
            found.add(name)
            wanted += _requirements_of(name, requirement.extras)
    return found


def _requirements_of(name: str, extras: set[str]) -> Iterator[str]:
    try:
        requires = distribution(name).requires or []
    except PackageNotFoundError:
        raise SystemExit(f"{name} is not installed here; `make setup` installs all that is pinned") from None
    for text in requires:
        marker = Requirement(text).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            yield text.partition(";")[0]


if __name__ == "__main__":
    main()
