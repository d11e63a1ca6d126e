"""What the console shows of a scheduler: gathered only while somebody watches, and told over its admin port."""

import asyncio
from collections import deque

import msgspec
from aiohttp import web

from common.clock import monotonic_ns, ms
from common.ids import RequestId, WorkerId
from common.messages.plans import IterationDone
from services.scheduler.budget import Budget
from services.scheduler.core import SchedulerCore
from services.scheduler.events import RunIteration
from services.scheduler.explain import Explanation

MAX_WATCHERS = 8
"""Answers of /watch at a time; one more is refused with 503."""
MAX_ITERATIONS = 512
"""Iterations kept for watchers: seconds of them. One that reads more slowly misses some."""
TELL_S = 0.25
"""Between two events of a watcher."""
SEND_TIMEOUT_S = 10.0
"""A watcher that does not read for so long is let go."""


class ChunkShown(msgspec.Struct, frozen=True, array_like=True):
    request_id: RequestId
    num_tokens: int


class IterationShown(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration that has come back."""

    worker_id: WorkerId
    iteration: int
    ago_ms: float  # from its result until this was told
    took_ms: float
    predicted_ms: float
    allowed_ms: float | None
    bound: str
    num_decodes: int
    chunks: tuple[ChunkShown, ...]


class WorkerShown(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    num_running: int
    num_blocks: int
    num_blocks_used: int
    prediction_error: float
    budget: Budget


class PoolShown(msgspec.Struct, frozen=True, kw_only=True):
    """One event of /watch."""

    model: str
    policy: str
    tbt_target_ms: float
    num_waiting: int
    max_waiting: int
    num_gaps: int
    num_late_gaps: int
    workers: tuple[WorkerShown, ...]
    iterations: tuple[IterationShown, ...]  # since the event before


class Watch:
    """Iterations for those who watch. note_plan and note_result cost an attribute's look-up while nobody does."""

    def __init__(self, core: SchedulerCore) -> None:
        self.is_watched = False
        self._core = core
        self._num_watchers = 0
        self._plans: deque[RunIteration] = deque(maxlen=MAX_ITERATIONS)
        self._shown: deque[tuple[int, int, RunIteration, IterationDone]] = deque(maxlen=MAX_ITERATIONS)
        self._num_shown = 0

    def note_plan(self, plan: RunIteration) -> None:
        """A plan has left; called only while somebody watches."""
        self._plans.append(plan)

    def note_result(self, worker_id: WorkerId, done: IterationDone, now_ns: int) -> None:
        """A result has come; called only while somebody watches."""
        for plan in self._plans:
            if (plan.worker_id, plan.epoch, plan.iteration) == (worker_id, done.epoch, done.iteration):
                self._plans.remove(plan)
                self._num_shown += 1
                self._shown.append((self._num_shown, now_ns, plan, done))
                return

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /watch: server-sent events, each a PoolShown, until the watcher goes."""
        if self._num_watchers >= MAX_WATCHERS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_WATCHERS} watch already\n")
        self._num_watchers += 1
        self.is_watched = True
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        last = self._num_shown
        try:
            await response.prepare(request)
            while True:
                shown, last = self._since(last)
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await response.write(b"data: " + msgspec.json.encode(shown) + b"\n\n")
                await asyncio.sleep(TELL_S)
        except (ConnectionError, TimeoutError):
            return response
        finally:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                self.is_watched = False
                self._plans.clear()
                self._shown.clear()

    async def explain(self, _: web.Request) -> web.Response:
        """GET /explain: an Explanation."""
        core, now_ns = self._core, monotonic_ns()
        explanation = Explanation(
            tbt_target_ms=ms(core.limits.tbt_target_ns),
            late_share=core.limits.late_share,
            policy=core.limits.policy,
            num_waiting=core.num_waiting,
            budgets=tuple(core.budget(worker, now_ns) for worker in core.workers),
        )
        return web.Response(body=msgspec.json.encode(explanation), content_type="application/json")

    def _since(self, last: int) -> tuple[PoolShown, int]:
        core, now_ns = self._core, monotonic_ns()
        iterations = tuple(
            _iteration(plan, done, now_ns - at_ns) for number, at_ns, plan, done in self._shown if number > last
        )
        shown = PoolShown(
            model="" if core.pool_card is None else core.pool_card.model.name,
            policy=core.limits.policy,
            tbt_target_ms=ms(core.limits.tbt_target_ns),
            num_waiting=core.num_waiting,
            max_waiting=core.limits.max_waiting,
            num_gaps=core.num_gaps,
            num_late_gaps=core.num_late_gaps,
            workers=tuple(
                WorkerShown(
                    worker_id=worker.worker_id,
                    num_running=len(worker.running),
                    num_blocks=worker.pool.num_blocks,
                    num_blocks_used=worker.pool.num_blocks - worker.pool.num_free,
                    prediction_error=worker.fit.error,
                    budget=core.budget(worker, now_ns),
                )
                for worker in core.workers
            ),
            iterations=iterations,
        )
        return shown, self._num_shown


def _iteration(plan: RunIteration, done: IterationDone, ago_ns: int) -> IterationShown:
    return IterationShown(
        worker_id=plan.worker_id,
        iteration=plan.iteration,
        ago_ms=ms(ago_ns),
        took_ms=ms(done.finished_ns - done.started_ns),
        predicted_ms=ms(plan.predicted_ns),
        allowed_ms=None if plan.allowed_ns is None else ms(plan.allowed_ns),
        bound=plan.bound,
        num_decodes=len(plan.decodes),
        chunks=tuple(ChunkShown(chunk.request_id, chunk.num_tokens) for chunk in plan.chunks),
    )
