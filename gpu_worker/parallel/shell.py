"""The process of one rank: rank 0 leads, and is the worker that the scheduler sees; the others follow."""

import os
import sys
import traceback

import structlog

from common.messages.links import Role
from common.process import run_process
from gpu_worker.config import WorkerConfig
from gpu_worker.parallel.errors import RankLost
from gpu_worker.parallel.processes import RankProcesses

log = structlog.get_logger()


def run(config: WorkerConfig) -> int:
    """Run one rank until it is stopped or another is lost. Does not return: the process ends here.

    At once, not by way of the interpreter's end: that joins threads and runs destructors of collectives which may wait
    for ranks that are gone.
    """
    status = 1
    try:
        status = _follow(config) if config.rank else _lead(config)
    except RankLost as lost:
        log.error("rank_lost", rank=lost.rank, detail=lost.detail)
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _follow(config: WorkerConfig) -> int:
    from gpu_worker.parallel.follow import follow  # noqa: PLC0415  # With torch, as the other.

    return run_process(Role.RANK, config, lambda process: follow(process, config))


def _lead(config: WorkerConfig) -> int:
    processes = RankProcesses(config)
    try:
        from gpu_worker.parallel.lead import lead  # noqa: PLC0415  # While the others import torch, too.

        return run_process(Role.WORKER, config, lambda process: lead(process, processes))
    finally:
        processes.close()
