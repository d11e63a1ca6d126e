"""Building the kernels with the machine's own compiler, once: the library is kept in the user's cache.

`python -m gpu_worker.kernels.build` builds what this machine can run; with --all, each instruction set (for images that
are built on one machine and run on another).
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal, get_args

from gpu_worker.processor import Processor

InstructionSet = Literal["amx", "avx512bf16", "avx512", "avx2", "portable"]
INSTRUCTION_SETS: tuple[InstructionSet, ...] = get_args(InstructionSet)
"""Fastest first, on AMD's processors."""

_ORDER_ELSEWHERE: tuple[InstructionSet, ...] = ("amx", "avx512", "avx512bf16", "avx2", "portable")
"""By vectors, AMD's cores make twice as many products of bfloat16 a cycle as of float32, and Intel's half as many."""

BUILD_TIMEOUT_S = 180.0
"""A build takes 5 to 20 s of one core; four other processes may want that core, too."""

_SOURCE = Path(__file__).parent / "source"
_COMPILERS = ("g++", "clang++", "c++")
_COMMON_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", "-ffp-contract=off")
# Without the preference for its whole width, GCC keeps to half of a 512-bit register.
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
_FLAGS: dict[InstructionSet, tuple[str, ...]] = {
    "amx": ("-DLEGATO_AMX", *_AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512bf16": ("-DLEGATO_AVX512BF16", *_AVX512_FLAGS, "-mavx512bf16"),
    "avx512": ("-DLEGATO_AVX512", *_AVX512_FLAGS),
    "avx2": ("-DLEGATO_AVX2", "-mavx2", "-mfma"),
    "portable": (),
}
_AVX512_FEATURES = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"})
_NEEDED: dict[InstructionSet, frozenset[str]] = {
    "amx": _AVX512_FEATURES | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512bf16": _AVX512_FEATURES | {"avx512_bf16"},
    "avx512": _AVX512_FEATURES,
    "avx2": frozenset({"avx2", "fma"}),
    "portable": frozenset(),
}
"""Features by the names of /proc/cpuinfo."""


class KernelsUnavailable(OSError):
    """The kernels cannot be built or loaded here; the message says why."""


def usable_instruction_sets() -> tuple[InstructionSet, ...]:
    """Return what this machine can run, fastest first; portable is always there."""
    processor = Processor.read()
    order = INSTRUCTION_SETS if processor.vendor == "AuthenticAMD" else _ORDER_ELSEWHERE
    return tuple(name for name in order if _NEEDED[name] <= processor.features)


def build(instruction_set: InstructionSet) -> Path:
    """Return the library for an instruction set, built now unless one of these sources and flags is in the cache.

    A machine that finds it there needs no compiler.

    Raises:
        KernelsUnavailable: If it must be built, and there is no compiler, or it fails.
    """
    flags = (*_COMMON_FLAGS, *_FLAGS[instruction_set])
    try:
        library = cache_directory() / f"legato-{instruction_set}-{_digest(flags)}.so"
    except OSError as error:
        raise KernelsUnavailable(f"the kernels' sources cannot be read: {error}") from error
    if library.is_file():
        return library
    compiler = _find_compiler()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Several workers may build at a time; each moves a whole file into place.
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = Path(scratch) / library.name
            _compile(compiler, flags, built)
            built.replace(library)
    except OSError as error:
        if isinstance(error, KernelsUnavailable):
            raise
        raise KernelsUnavailable(f"the kernels cannot be written to {library.parent}: {error}") from error
    return library


def cache_directory() -> Path:
    """Where built libraries lie."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "legato" / "kernels"


def _find_compiler() -> str:
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise KernelsUnavailable(f"no C++ compiler found; looked for {', '.join(_COMPILERS)}")


def _digest(flags: tuple[str, ...]) -> str:
    """Return a name for what a build depends on. Not the compiler: where a built library is used, there may be none."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join((*flags, platform.machine())).encode())
    return digest.hexdigest()[:16]


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    command = [compiler, *flags, str(_SOURCE / "program.cpp"), "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"{command[0]} took more than {BUILD_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        first_error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
        raise KernelsUnavailable(f"{command[0]} failed: {first_error}")


def _main(arguments: list[str]) -> int:
    names = INSTRUCTION_SETS if "--all" in arguments else usable_instruction_sets()[:1]
    for name in names:
        try:
            print(f"kernels for {name}: {build(name)}")
        except KernelsUnavailable as error:
            print(f"kernels for {name} are unavailable, plain torch will be used: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
