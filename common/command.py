"""From a command line to a running process."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from common.config import ConfigError, add_options, load

T = TypeVar("T")


def run_command(
    section: str, config_type: type[T], description: str, run: Callable[[T], int], argv: Sequence[str] | None = None
) -> int:
    """Parse argv (the process's own by default) into config_type, and return what run returns; 2 for bad options.

    Args:
        section: The command's name, and its table in a configuration file.
        config_type: See common.config.
        description: What `--help` says first.
        run: Given the configuration; returns the exit status.
        argv: Without the command's name.
    """
    parser = argparse.ArgumentParser(prog=f"legato {section}", description=description)
    add_options(parser, config_type)
    flags = vars(parser.parse_args(argv))
    try:
        config = load(config_type, section, flags)
    except ConfigError as error:
        print(f"legato {section}: {error}", file=sys.stderr)
        return 2
    return run(config)
