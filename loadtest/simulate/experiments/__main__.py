"""`python -m loadtest.simulate.experiments NAME --data DIR`: run one, and write its Markdown and JSON."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from loadtest.simulate.experiments import ablation, capacity, late_share, law
from loadtest.simulate.experiments.shared import Lab, Result
from loadtest.simulate.runs import ChildFailed

EXPERIMENTS: dict[str, Callable[[Lab], Result]] = {
    "ablation": ablation.run,
    "capacity": capacity.run,
    "law": law.run,
    "late-share": late_share.run,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one experiment; 0 when it showed what it should, 1 when it did not, 2 when it could not run."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.simulate.experiments")
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder with traces/ and profiles/; else generated ones"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results"), metavar="DIR", help="where results go")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds of each figure (default: 3)")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="requests of a run, if not as designed")
    flags = parser.parse_args(argv)
    if flags.data is not None and not flags.data.is_dir():
        print(f"--data {flags.data} is no folder", file=sys.stderr)
        return 2
    lab = Lab(data=flags.data, processes=flags.processes, num_seeds=flags.seeds, num_requests=flags.requests or None)
    begun_s = time.monotonic()
    try:
        result = EXPERIMENTS[flags.name](lab)
    except ChildFailed as error:
        print(error, file=sys.stderr)
        return 2
    result.write(flags.out, time.monotonic() - begun_s)
    print(result.markdown)
    return 0 if result.is_as_claimed else 1


if __name__ == "__main__":
    sys.exit(main())
