"""A rank other than 0: it runs what rank 0 tells it to, until rank 0 goes or it is stopped."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from common.actor.mailbox import Mailbox
from common.clock import monotonic_ns
from common.messages.links import Role
from common.messages.plans import IterationDone, PlanRefused
from common.messages.ranks import RankMeasure, RankPlan, RankReady, RankStart, StageDone
from common.process import Process, tune_garbage_collector
from common.wire.link import LinkFull, Peer, PeerDown, PeerGone, PeerUp, Received
from common.wire.session import Endpoint
from gpu_worker.config import WorkerConfig
from gpu_worker.device_thread import Connection
from gpu_worker.parallel.build import BuiltStage, load_part
from gpu_worker.parallel.errors import RankLost
from gpu_worker.parallel.group import MAX_UNSENT
from gpu_worker.parallel.layout import Layout
from gpu_worker.parallel.meeting import join
from gpu_worker.parallel.stage_thread import Planned, StageThread
from gpu_worker.shell import tell_loop
from gpu_worker.slots import Row

log = structlog.get_logger()


async def follow(process: Process, config: WorkerConfig) -> None:
    """Serve as a rank until rank 0 says goodbye, or a signal comes.

    Raises:
        RankLost: If rank 0 is gone without a word.
        OSError: If this rank's part of the model cannot be loaded.
    """
    assert config.rank_address is not None, "checked with the options"
    mailbox = Mailbox()
    process.readiness.set_not_ready("loading the model")
    process.sockets.dial(
        config.rank_address,
        Endpoint(hello=process.hello(rank=config.rank), peer_roles=frozenset({Role.WORKER}), mailbox=mailbox),
    )
    follower = _Follower(process, config)
    serving = asyncio.create_task(follower.serve(mailbox), name="mailbox")
    stopping = asyncio.create_task(process.stopping.wait(), name="stopping")
    try:
        await asyncio.wait((serving, follower.failed, stopping), return_when=asyncio.FIRST_COMPLETED)
        if follower.failed.done():
            follower.failed.result()
        if serving.done():
            serving.result()
    finally:
        # The device thread may wait for ranks that do the same; it ends with the process (see shell).
        for end in (serving, follower.failed, stopping):
            end.cancel()


class _Follower:
    """Passes what rank 0 says to the device thread, and tells it what came of it."""

    def __init__(self, process: Process, config: WorkerConfig) -> None:
        assert config.rank is not None, "checked with the options"
        self._process = process
        self._config = config
        self._layout = Layout(tp=config.tp, pp=config.pp, rank=config.rank)
        self._loop = asyncio.get_running_loop()
        self._peer: Peer | None = None
        self._ready: RankReady | None = None
        self._connection_number = -1
        self._connection: Connection | None = None
        self._built: BuiltStage | None = None
        self._start: concurrent.futures.Future[RankStart] = concurrent.futures.Future()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._thread = StageThread(
            build=self._build,
            on_built=lambda built: tell_loop(self._loop, lambda: self._take_built(built)),
            on_failed=lambda error: tell_loop(self._loop, lambda: self._fail(error)),
            run_rows=self._run_rows,
        )

    async def serve(self, mailbox: Mailbox) -> None:
        """Take events until rank 0 goes."""
        async for event in mailbox:
            match event:
                case PeerUp():
                    self._peer = event.peer
                    self._say_ready()
                case PeerDown():
                    if event.detail == "the process stopped":
                        return
                    raise RankLost(0, event.detail)
                case Received(message=RankStart() as start) if not self._start.done():
                    self._start.set_result(start)
                case Received(message=RankMeasure() as measure):
                    self._thread.submit_made_up(measure.num_tokens)
                case Received(message=RankPlan() as told):
                    self._submit(told)
                case Received():
                    event.peer.drop(f"a rank takes plans, not {type(event.message).__name__}")

    # --- in the device thread

    def _build(self, should_stop: Callable[[], bool]) -> BuiltStage:
        part = load_part(self._config, self._layout)
        ready = RankReady(settings=part.settings(self._config))
        tell_loop(self._loop, lambda: self._say_ready(ready))
        start = self._start.result()  # Bounded by rank 0, which waits for its ranks so long and then goes.
        assert self._config.rank_address is not None, "checked with the options"
        store = join(start.store, self._layout.num_ranks)
        return part.assemble(
            self._config,
            part.meet(store, self._config),
            lambda error: tell_loop(self._loop, lambda: self._fail(error)),
        )

    def _run_rows(self, built: BuiltStage, rows: Sequence[Row], planned: Planned | None) -> None:
        built.stage.run(rows, self._report)

    def _report(self, done: StageDone) -> None:
        """In whichever thread the stage reports."""
        if self._layout.leads_stage and self._layout.pp > 1:
            tell_loop(self._loop, lambda: self._send(done))

    # --- in the loop

    def _submit(self, told: RankPlan) -> None:
        assert self._built is not None, "rank 0 sends plans once every rank has run an iteration"
        if self._connection is None or told.connection != self._connection_number:
            self._connection_number = told.connection
            self._connection = Connection(self._built.limits, on_result=_ignore)
        # Of as many as wait at rank 0, and those by which its stage can run ahead of this one.
        most = self._config.max_queued_plans + (MAX_UNSENT + 1) * self._layout.pp
        assert self._thread.num_queued < most, f"rank 0 has sent more than {most} plans that wait here"
        self._thread.submit(self._connection, told.plan, monotonic_ns())

    def _take_built(self, built: BuiltStage) -> None:
        self._built = built
        self._process.readiness.set_ready()
        tune_garbage_collector()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _say_ready(self, ready: RankReady | None = None) -> None:
        """Say so once both are there: the connection, and the rank's part of the model."""
        self._ready = ready or self._ready
        if self._ready is not None and self._peer is not None:
            self._send(self._ready)

    def _send(self, message: RankReady | StageDone) -> None:
        assert self._peer is not None, "rank 0 has spoken first"
        try:
            self._peer.send(message)
        except LinkFull as full:
            self._peer.drop(str(full))  # Rank 0 takes nothing: it cannot go on without this message.
        except PeerGone:
            pass  # Its PeerDown is on its way.


def _ignore(result: IterationDone | PlanRefused | Any) -> None:
    """Rank 0 refuses the same plans for the same reasons, and tells the scheduler."""
