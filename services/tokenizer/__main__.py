"""`python -m services.tokenizer`, and the command `legato tokenizer`."""

import sys
from collections.abc import Sequence

from common.command import run_command
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.shell import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a tokenizer until it is asked to stop; return the exit status."""
    description = "Turns prompts into tokens, and tokens into text with its stop strings, for any number of gateways."
    return run_command("tokenizer", TokenizerConfig, description, run, argv)


if __name__ == "__main__":
    sys.exit(main())
