"""`python -m gpu_worker`, and `legato worker`."""

import sys
from collections.abc import Sequence

from common.command import run_command
from gpu_worker.config import WorkerConfig
from gpu_worker.threads import set_up_threads


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker; return the exit status."""
    return run_command("worker", WorkerConfig, "Runs a model and executes a scheduler's plans on it.", _run, argv)


def _run(config: WorkerConfig) -> int:
    if config.device == "simulated":
        from gpu_worker.simulated.shell import run as simulate  # noqa: PLC0415  # Without torch.

        return simulate(config)
    set_up_threads()
    # Torch comes in with either, and must find the threads set up.
    if config.num_ranks > 1:
        from gpu_worker.parallel.shell import run as run_rank  # noqa: PLC0415

        return run_rank(config)
    from gpu_worker.shell import run  # noqa: PLC0415

    return run(config)


if __name__ == "__main__":
    sys.exit(main())
