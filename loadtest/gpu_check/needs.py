"""What the check cannot do without, told before anything else is imported. Standard library alone."""

import importlib.util
import platform
import sys

NEEDS = ("torch", "numpy", "msgspec", "structlog")
"""By the names of both module and package."""
CUDA_NEEDS = ("triton",)
PYTHON = (3, 11)


def missing(device: str) -> list[str]:
    """Return the packages that are not installed."""
    wanted = (*NEEDS, *(CUDA_NEEDS if device == "cuda" else ()))
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def advice(names: list[str]) -> str:
    """Return how to bring them to a machine that reaches no package index."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = " ".join(names)
    return (
        f"not installed here: {', '.join(names)}. On a machine with a network:\n"
        f"  pip download --only-binary=:all: --python-version {python} --platform manylinux2014_{platform.machine()} "
        f"--dest wheels {packages}\n"
        f"Bring wheels/ here, and:\n"
        f"  pip install --no-index --find-links wheels {packages}"
    )
