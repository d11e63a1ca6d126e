"""`legato gpu-check`, and `python -m loadtest.gpu_check` where little more than torch is installed."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from loadtest.gpu_check.needs import PYTHON, advice, missing

BUDGET_S = 400.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; return 0 if nothing failed, 1 if something did, 2 if it cannot begin."""
    parser = argparse.ArgumentParser(
        prog="legato gpu-check",
        description="Says whether this GPU computes rightly and how fast: one JSON line a stage. Needs no model.",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few cases: what a CPU gets through")
    parser.add_argument(
        "--attention-backend", default="auto", help="fa3, fa2, triton; auto takes the first that serves"
    )
    parser.add_argument("--tbt-target-ms", type=float, default=30.0, help="of the stall test (default: 30)")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for the whole check (default: 400)")
    parser.add_argument("--stages", default="", help="only these, such as probe,kernels (default: all)")
    parser.add_argument("--output", type=Path, help="write the lines here, too")
    options = parser.parse_args(argv)
    began = time.monotonic()
    if sys.version_info < PYTHON:
        print(f"legato gpu-check: Python {'.'.join(map(str, PYTHON))} or later is needed", file=sys.stderr)
        return 2
    if names := missing(options.device):
        print(f"legato gpu-check: {advice(names)}", file=sys.stderr)
        return 2
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels, too, where the package is there.
    # Not above: what it needs has only now been looked for.
    from loadtest.gpu_check.check import run_check  # noqa: PLC0415

    return run_check(options, budget_end=began + options.budget_s)


if __name__ == "__main__":
    sys.exit(main())
