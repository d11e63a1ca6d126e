"""`legato gateway`, and `python -m services.gateway`."""

import sys
from collections.abc import Sequence

from common.command import run_command
from services.gateway.config import GatewayConfig
from services.gateway.shell import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway with the options in argv; return the exit status."""
    return run_command(
        "gateway",
        GatewayConfig,
        "The HTTP front of a ring: OpenAI's API over tokenizers, schedulers, workers.",
        run,
        argv,
    )


if __name__ == "__main__":
    sys.exit(main())
