"""The threads beside the event loop, in which jobs run. `tokenizers` releases the interpreter while it encodes
a batch."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from common.actor.mailbox import Mailbox
from common.clock import monotonic_ns
from services.tokenizer.jobs import Job, JobId, JobResult, run_job
from services.tokenizer.text.model_tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A thread is done with a job, or a job was dropped before it began."""

    job_id: JobId
    future: "Future[tuple[JobResult, int]]"


class Threads:
    """Runs jobs; each answers with one JobEnded in the mailbox. Bounded by the core, which counts the jobs."""

    def __init__(self, num_threads: int, model: ModelTokenizer, mailbox: Mailbox) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
        self._model = model
        self._mailbox = mailbox
        self._loop = asyncio.get_running_loop()
        self._futures: dict[JobId, Future[tuple[JobResult, int]]] = {}

    def start(self, job: Job) -> None:
        future = self._pool.submit(_timed_job, job, self._model)
        self._futures[job.job_id] = future
        future.add_done_callback(lambda future: self._answer(job.job_id, future))

    def drop(self, job_id: JobId) -> None:
        """Cancel a job unless it runs already."""
        if (future := self._futures.get(job_id)) is not None:
            future.cancel()

    def close(self) -> None:
        """Drop what has not begun, and wait for the rest: one prompt a thread at most."""
        self._pool.shutdown(cancel_futures=True)

    def forget(self, job_id: JobId) -> None:
        del self._futures[job_id]

    def _answer(self, job_id: JobId, future: "Future[tuple[JobResult, int]]") -> None:
        self._loop.call_soon_threadsafe(self._mailbox.put, JobEnded(job_id, future))


def _timed_job(job: Job, model: ModelTokenizer) -> tuple[JobResult, int]:
    started_ns = monotonic_ns()
    result = run_job(job, model)
    return result, monotonic_ns() - started_ns
