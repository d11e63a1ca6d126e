"""Rank 0: a worker to the scheduler, and to the other ranks the one that says what to run."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from common.clock import monotonic_ns
from common.messages.plans import Plan
from common.messages.ranks import RankMeasure, RankPlan, RankReady, RankStart, StageDone
from common.process import Process
from gpu_worker.config import WorkerConfig
from gpu_worker.device_thread import Connection
from gpu_worker.errors import UnusableModel
from gpu_worker.parallel.build import BuiltStage, load_part
from gpu_worker.parallel.layout import Layout
from gpu_worker.parallel.meeting import Meeting
from gpu_worker.parallel.processes import RankProcesses
from gpu_worker.parallel.progress import Progress, Through
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.stage import Stage
from gpu_worker.parallel.stage_thread import Planned, StageThread
from gpu_worker.shell import measured, serve_plans, tell_loop
from gpu_worker.slots import Row

LOSS_GRACE_S = 0.5
"""How long after a loss to wait for the best word of it: how a process ended."""
START_GRACE_S = 5.0
"""The same while ranks start, when one may have refused its options, which only its exit status tells."""


async def lead(process: Process, processes: RankProcesses) -> None:
    """Serve as rank 0 until stopped, with the ranks that have been started.

    Raises:
        RankLost: If another rank is gone; this worker cannot go on without it.
        OSError: If the model cannot be served, or not by these ranks.
    """
    process.readiness.set_not_ready("loading the model")
    config = processes.config
    leader = _Leader(process, config)
    serving = asyncio.create_task(leader.ranks.serve(config.rank_start_timeout_s), name="ranks")
    watching = asyncio.create_task(processes.watch(), name="rank processes")
    stopping = asyncio.create_task(process.stopping.wait(), name="stopping")
    ends = (leader.failed, serving, watching, stopping)
    is_orderly = False
    try:
        await asyncio.wait((leader.built, *ends), return_when=asyncio.FIRST_COMPLETED)
        if leader.built.done():
            built = leader.built.result()
            await serve_plans(process, config, built.limits, built.card, leader, ends)
        if not stopping.done():
            if not leader.has_refused:
                await asyncio.wait((watching,), timeout=LOSS_GRACE_S if leader.built.done() else START_GRACE_S)
            if watching.done() and isinstance(watching.exception(), UnusableModel):
                # What one rank refuses this one mostly refuses, too, and says why in its own words.
                await asyncio.wait((leader.failed,), timeout=START_GRACE_S)
            losses = (watching, serving, leader.failed)
            for loss in (leader.failed, *losses) if leader.has_refused else losses:
                if loss.done():
                    loss.result()
        is_orderly = True
    finally:
        if is_orderly:
            # First the iteration in hand, for which the others are needed.
            await asyncio.get_running_loop().run_in_executor(None, leader.stop)
            leader.ranks.dismiss()
            await processes.stop()
        processes.close()
        leader.close()
        for end in ends:
            end.cancel()


class _Leader:
    """The device to the scheduler's connection: tells the other ranks of each plan, and runs rank 0's part."""

    def __init__(self, process: Process, config: WorkerConfig) -> None:
        """Bind the address for the other ranks, and begin to load.

        Raises:
            OSError: If the address cannot be bound, or leaves loopback while there are no keys.
        """
        assert config.rank_address is not None, "checked with the options, or chosen"
        self._config = config
        self._layout = layout = Layout(tp=config.tp, pp=config.pp, rank=0)
        self._loop = asyncio.get_running_loop()
        self._through = Through(config.rank_timeout_s)
        self._stage: Stage | None = None
        self._progress = Progress(layout.pp, on_through=self._note_through)
        self.ranks = Ranks(process, layout, config.rank_address, self._progress)
        self._meeting: Meeting | None = None
        self._connection: Connection | None = None
        self._num_connections = 0
        self.built: asyncio.Future[BuiltStage] = self._loop.create_future()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._thread = StageThread(
            build=self._build,
            on_built=lambda built: tell_loop(self._loop, lambda: self.built.set_result(built)),
            on_failed=lambda error: tell_loop(self._loop, lambda: self._fail(error)),
            run_rows=self._run_rows,
        )

    def submit(self, connection: Connection, plan: Plan, received_ns: int) -> bool:
        """Have every rank run a plan. False: too many wait, and nobody was told."""
        if self._thread.num_queued >= self._config.max_queued_plans:
            return False
        if connection is not self._connection:
            self._connection = connection
            self._num_connections += 1
        self.ranks.tell(RankPlan(connection=self._num_connections, plan=plan))
        self._thread.submit(connection, plan, received_ns)
        return True

    @property
    def has_refused(self) -> bool:
        """Whether this rank's part of the model cannot be served."""
        return self.failed.done() and isinstance(self.failed.exception(), OSError)

    def stop(self) -> None:
        """Finish the iteration in hand, drop the rest, and end. Waits STOP_TIMEOUT_S at most."""
        self.ranks.all_ready.cancel()
        self._through.close()
        if self._stage is not None:
            self._stage.interrupt()
        self._thread.stop()

    def close(self) -> None:
        """Tidy up."""
        if self._meeting is not None:
            self._meeting.close()

    # --- in the device thread

    def _build(self, should_stop: Callable[[], bool]) -> BuiltStage:
        """Load, meet the others, warm up and measure."""
        config, layout = self._config, self._layout
        assert config.rank_address is not None, "it is bound"
        started_ns = monotonic_ns()
        part = load_part(config, layout)
        ready = RankReady(settings=part.settings(config))
        tell_loop(self._loop, lambda: self.ranks.note_own(ready))
        self.ranks.all_ready.result()  # Bounded by --rank-start-timeout-s.
        self._meeting = meeting = Meeting(config.rank_address, layout.num_ranks)
        tell_loop(self._loop, lambda: self.ranks.tell(RankStart(store=meeting.url)))
        built = part.assemble(
            config,
            part.meet(meeting.store, config),
            lambda error: tell_loop(self._loop, lambda: self._fail(error)),
        )
        self._stage = built.stage
        load_ns = monotonic_ns() - started_ns
        card = measured(built.card, _Together(self, built), built.limits, config, should_stop, load_ns=load_ns)
        return dataclasses.replace(built, card=card)

    def run_made_up(self, built: BuiltStage, rows: Sequence[Row]) -> None:
        """Have every rank run an iteration of gpu_worker.profile, and wait until all stages are through."""
        num_tokens = sum(row.num_tokens for row in rows)
        tell_loop(self._loop, lambda: self.ranks.tell(RankMeasure(num_tokens=num_tokens)))
        self._run_rows(built, rows, None)
        self._through.wait()

    def _run_rows(self, built: BuiltStage, rows: Sequence[Row], planned: Planned | None) -> None:
        built.stage.run(rows, lambda done: tell_loop(self._loop, lambda: self._progress.note_first(planned, done)))

    # --- in the loop

    def _note_through(self, planned: Planned | None, last: StageDone) -> None:
        """All stages are through with an iteration."""
        assert self._stage is not None, "it has run"
        self._stage.take_back(last.token_ids)
        if planned is None:
            self._through.note()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


class _Together:
    """What gpu_worker.profile measures: an iteration of all ranks."""

    def __init__(self, leader: _Leader, built: BuiltStage) -> None:
        self._leader = leader
        self._built = built

    def run(self, rows: Sequence[Row]) -> None:
        self._leader.run_made_up(self._built, rows)
