"""`legato simulate …`: the scheduler's core under a virtual clock."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.config import ConfigError, add_options, load
from loadtest.simulate.effects_log import EffectsLog
from loadtest.simulate.options import SimulateOptions
from loadtest.simulate.report import ProgressBar, table_of
from loadtest.simulate.requests import load_workload
from loadtest.simulate.runs import ChildFailed, Job, run_all, run_one

T = TypeVar("T")

USAGE_NOTE = "`legato simulate capacity …` searches the highest rate at which the targets hold."


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate; return the exit status: 0 well, 2 where the options describe nothing that can be simulated."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["capacity"]:
            from loadtest.simulate.capacity import main as capacity  # noqa: PLC0415 - a run does not need it.

            return capacity(arguments[1:])
        return _simulate(arguments)
    except (ConfigError, ValueError, OSError, ChildFailed) as error:
        print(f"legato simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def options_from(parser: argparse.ArgumentParser, config_type: type[T], argv: Sequence[str]) -> tuple[T, Any]:
    """Return the options, and what else the parser knows. The environment is not read: LEGATO_ variables configure a
    server, and would steer a simulation unseen.

    Raises:
        ConfigError: If an option is wrong.
    """
    add_options(parser, config_type)
    flags = parser.parse_args(argv)
    return load(config_type, "simulate", vars(flags), {}), flags


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write one object, readable by people as well."""
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _simulate(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="legato simulate", epilog=USAGE_NOTE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as one object")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write each event and effect as a line (one seed)")
    options, flags = options_from(parser, SimulateOptions, argv)
    jobs = [Job(options=options, seed=seed) for seed in options.seed]
    if flags.log is not None and len(jobs) > 1:
        raise ConfigError(f"--log takes one seed; --seed names {len(jobs)}")
    source = load_workload(options.workload, options.traces, options.seed[0]).source
    if len(jobs) == 1:
        bar = ProgressBar(options.requests, "requests")
        with EffectsLog(flags.log) as log:
            outcomes = [run_one(jobs[0], log.observer, bar.show)]
    else:
        bar = ProgressBar(len(jobs), "seeds")
        outcomes = run_all(jobs, options.processes, bar.show)
    bar.close()
    runs = [outcome.as_object() for outcome in outcomes]
    together = outcomes[0]
    for outcome in outcomes[1:]:
        together.merge(outcome)
    print(table_of(together, source))
    if flags.json is not None:
        write_json(flags.json, together.as_object() | ({"runs": runs} if len(runs) > 1 else {}))
    return 0
