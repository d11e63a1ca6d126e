"""The worker's process: one link to the scheduler, one thread with the device, plans one way and results the other."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
import structlog

from common.actor.mailbox import Mailbox
from common.clock import monotonic_ns, ms
from common.messages.cards import WorkerCard
from common.messages.links import Role
from common.messages.plans import IterationDone, Plan, PlanRefused
from common.process import Process, run_process, tune_garbage_collector
from common.wire.link import LinkFull, Peer, PeerDown, PeerGone, PeerUp, Received
from common.wire.session import Endpoint
from gpu_worker.build import Built, build
from gpu_worker.config import WorkerConfig
from gpu_worker.device_thread import Connection, DeviceThread
from gpu_worker.iteration_spans import spans_of
from gpu_worker.profile import Runs, profile
from gpu_worker.slots import Limits

log = structlog.get_logger()


def run(config: WorkerConfig) -> int:
    """Run a worker until it is stopped; return the exit status. Call threads.set_up_threads before importing this."""
    return run_process(Role.WORKER, config, lambda process: _main(process, config))


async def _main(process: Process, config: WorkerConfig) -> None:
    process.readiness.set_not_ready("loading the model")
    loop = asyncio.get_running_loop()
    built: asyncio.Future[Built] = loop.create_future()
    failed: asyncio.Future[None] = loop.create_future()
    device = DeviceThread(
        build=lambda should_stop: _build(config, should_stop),
        on_built=lambda value: tell_loop(loop, lambda: built.set_result(value)),
        on_failed=lambda error: tell_loop(loop, lambda: failed.set_exception(error)),
        max_queued_plans=config.max_queued_plans,
    )
    stopping = asyncio.create_task(process.stopping.wait(), name="stopping")
    try:
        await asyncio.wait((built, failed, stopping), return_when=asyncio.FIRST_COMPLETED)
        if built.done():
            await serve_plans(process, config, built.result().limits, built.result().card, device, (failed, stopping))
        if failed.done():
            failed.result()
    finally:
        stopping.cancel()
        failed.cancel()
        # In an executor: the thread may need the loop's ear for its last result.
        await loop.run_in_executor(None, device.stop)


def _build(config: WorkerConfig, should_stop: Callable[[], bool]) -> Built:
    """Load, warm up and measure. In the device thread."""
    started_ns = monotonic_ns()
    built = build(config)
    loaded_ns = monotonic_ns()
    card = measured(built.card, built.runner, built.limits, config, should_stop, load_ns=loaded_ns - started_ns)
    return Built(built.runner, built.limits, card)


def measured(
    card: WorkerCard,
    runner: Runs,
    limits: Limits,
    config: WorkerConfig,
    should_stop: Callable[[], bool],
    *,
    load_ns: int,
) -> WorkerCard:
    """Profile what has been loaded; return its card with the profile. In the device thread."""
    started_ns = monotonic_ns()
    points = profile(runner, limits, config.profile_seconds, should_stop)
    log.info(
        "model_loaded",
        model=card.model.name,
        dtype=card.dtype,
        attention=card.attention,
        tp=card.tensor_parallel,
        pp=card.pipeline_parallel,
        max_model_len=card.model.max_model_len,
        kv_tokens=card.num_blocks * card.block_size,
        load_ms=ms(load_ns),
        profile_ms=ms(monotonic_ns() - started_ns),
        iteration_ms={point.num_tokens: round(ms(point.iteration_ns), 1) for point in points},
    )
    return msgspec.structs.replace(card, profile=points)


def tell_loop(loop: asyncio.AbstractEventLoop, do: Callable[[], None]) -> None:
    """Have do run in the loop, from another thread. If the loop has ended, so has whoever would have cared."""
    try:
        loop.call_soon_threadsafe(do)
    except RuntimeError:
        if not loop.is_closed():
            raise


class PlanDevice(Protocol):
    """What runs plans, in the order in which they came."""

    def submit(self, connection: Connection, plan: Plan, received_ns: int) -> bool:
        """Queue a plan; its result goes to the connection. False: too many wait, and nothing was queued."""


async def serve_plans(
    process: Process,
    config: WorkerConfig,
    limits: Limits,
    card: WorkerCard,
    device: PlanDevice,
    ends: "Iterable[asyncio.Future[Any]]",
) -> None:
    """Dial the scheduler and run its plans until one of ends comes."""
    tune_garbage_collector()
    mailbox = Mailbox()
    process.readiness.set_not_ready(f"no scheduler at {config.scheduler}")
    process.sockets.dial(
        config.scheduler,
        Endpoint(hello=process.hello(card), peer_roles=frozenset({Role.SCHEDULER}), mailbox=mailbox),
    )
    worker = _Worker(process, config, limits, device)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.serve(mailbox), name="mailbox")
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        worker.disconnect()
        mailbox.close()


class _Worker:
    """Passes plans on to the device thread, and results on to the scheduler."""

    def __init__(self, process: Process, config: WorkerConfig, limits: Limits, device: PlanDevice) -> None:
        self._process = process
        self._config = config
        self._limits = limits
        self._device = device
        self._loop = asyncio.get_running_loop()
        self._peer: Peer | None = None
        self._connection: Connection | None = None
        self._spans = spans_of(process, config)

    async def serve(self, mailbox: Mailbox) -> None:
        async for event in mailbox:
            match event:
                case PeerUp():
                    self._connect(event.peer)
                case PeerDown() if event.peer is self._peer:
                    self.disconnect()
                    self._process.readiness.set_not_ready(f"no scheduler at {self._config.scheduler}")
                    log.warning("scheduler_lost", detail=event.detail)
                case Received(message=Plan() as plan) if event.peer is self._peer:
                    self._submit(event.peer, plan)
                case Received() if event.peer is self._peer:
                    event.peer.drop(f"a worker takes plans, not {type(event.message).__name__}")

    def disconnect(self) -> None:
        """Forget the scheduler: its plans that wait, and the results of those that run."""
        if self._connection is not None:
            self._connection.is_lost = True
        self._peer = self._connection = None

    def _connect(self, peer: Peer) -> None:
        """Start from nothing: a new connection's first plan opens an epoch."""
        assert self._peer is None, "a dial has one connection at a time, and tells of its end before the next"
        connection = Connection(
            self._limits, on_result=lambda result: tell_loop(self._loop, lambda: self._report(peer, result))
        )
        self._peer, self._connection = peer, connection
        self._process.readiness.set_ready()
        log.info("scheduler_connected", scheduler=peer.hello.instance_id)

    def _submit(self, peer: Peer, plan: Plan) -> None:
        assert self._connection is not None, "a peer has a connection"
        if not self._device.submit(self._connection, plan, received_ns=monotonic_ns()):
            peer.drop(f"more than {self._config.max_queued_plans} plans wait for the device")
        if self._spans is not None:
            self._spans.keep(plan)

    def _report(self, peer: Peer, result: IterationDone | PlanRefused) -> None:
        if peer is not self._peer:
            return  # The scheduler that asked for it is gone, or has forgotten this worker.
        match result:
            case IterationDone():
                log.debug(
                    "iteration_finished",
                    epoch=result.epoch,
                    iteration=result.iteration,
                    num_sampled=len(result.slots),
                    device_ms=ms(result.device_ns),
                    bubble_ms=ms(result.bubble_ns),
                )
            case PlanRefused():
                log.warning("plan_refused", epoch=result.epoch, iteration=result.iteration, detail=result.detail)
        try:
            peer.send(result)
        except LinkFull as full:
            peer.drop(str(full))  # A missing result would leave the scheduler waiting: better that it sees a loss.
        except PeerGone:
            pass  # Its PeerDown is on its way.
        if self._spans is not None and isinstance(result, IterationDone):
            self._spans.finish(result)  # Last: the scheduler waits for the result.
