"""`legato load …`: the sub-commands of the load generator."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from common.config import ConfigError

USAGE = """usage: legato load COMMAND …

  run        send a load and measure it: legato load run --rate 4 --requests 200 --json out.json --html out.html
  stall      steady streams, and a long prompt every few seconds: what do the streams feel of it?
  compare    two reports of run: what changed, and is it more than chance? legato load compare A.json B.json
  capacity   the highest rate at which the targets hold

legato load COMMAND --help tells the options. Any OpenAI-compatible server will do.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; return the exit status: 0 well, 1 a finding (invalid, regression), 2 not begun."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "stall": _stall,
        "compare": _compare,
        "capacity": _capacity,
        "shard": _shard,  # What run starts for --processes; not for people.
    }
    if name not in commands:
        is_help = name in ("-h", "--help", "help")
        print(USAGE, file=sys.stdout if is_help else sys.stderr, end="")
        return 0 if is_help else 2
    try:
        return commands[name](arguments[1:])
    except ConfigError as error:
        print(f"legato load {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


# Each command imports its own module: `compare` must not wait for what `run` needs.


def _run(argv: list[str]) -> int:
    from loadtest.options import options_from  # noqa: PLC0415
    from loadtest.run import RunOptions, run  # noqa: PLC0415

    return run(options_from(RunOptions, "run", argv))


def _stall(argv: list[str]) -> int:
    from loadtest.options import options_from  # noqa: PLC0415
    from loadtest.stall import StallOptions, stall  # noqa: PLC0415

    return stall(options_from(StallOptions, "stall", argv))


def _compare(argv: list[str]) -> int:
    from loadtest.compare import main as compare  # noqa: PLC0415

    return compare(argv)


def _capacity(argv: list[str]) -> int:
    from loadtest.capacity import CapacityOptions, capacity  # noqa: PLC0415
    from loadtest.options import options_from  # noqa: PLC0415

    return capacity(options_from(CapacityOptions, "capacity", argv))


def _shard(argv: list[str]) -> int:
    from loadtest.shards import run_child  # noqa: PLC0415

    which, file = argv
    return run_child(int(which), Path(file))
