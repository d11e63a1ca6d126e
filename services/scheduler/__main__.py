"""`python -m services.scheduler`, and `legato scheduler`."""

import sys
from collections.abc import Sequence

from common.command import run_command
from services.scheduler.config import SchedulerConfig
from services.scheduler.shell import run

DESCRIPTION = """Decides, for each worker and each iteration, which requests compute which of their tokens. One
scheduler serves one model; tokenizers and workers dial it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scheduler with the options in argv; return its exit status."""
    return run_command("scheduler", SchedulerConfig, DESCRIPTION, run, argv)


if __name__ == "__main__":
    sys.exit(main())
