"""The scheduler's process: feeds messages to the core and carries out what it decides."""

import asyncio
from collections import deque
from typing import assert_never

import structlog
from msgspec.structs import replace
from prometheus_client import REGISTRY

from common.actor.mailbox import Mailbox
from common.clock import NS_PER_S, monotonic_ns, ms
from common.ids import InstanceId, TokenizerId, WorkerId
from common.injection import Delays
from common.messages import (
    ActorMessage,
    Cancel,
    IterationDone,
    Plan,
    PlanRefused,
    PoolCard,
    RequestArrived,
    StopReached,
    StreamBatch,
)
from common.messages.links import Role
from common.process import Process, run_process, tune_garbage_collector
from common.wire.link import LinkFull, Peer, PeerDown, PeerGone, PeerUp, Received
from common.wire.session import Endpoint
from services.scheduler import metrics
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import SchedulerCore
from services.scheduler.encoder import PlanEncoder
from services.scheduler.events import (
    DismissWorker,
    Effect,
    Event,
    PoolChanged,
    RequestFinished,
    RequestPreempted,
    RunIteration,
    SendStreams,
    TimerFired,
    TokenizerLost,
    WakeAt,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from services.scheduler.fits import load_fit, save_fit
from services.scheduler.recording.recorder import Recorder
from services.scheduler.spans import RequestSpans
from services.scheduler.watch import Watch

log = structlog.get_logger()


def run(config: SchedulerConfig) -> int:
    """Serve until asked to stop; return the exit status."""

    async def main(process: Process) -> None:
        shell = SchedulerShell(process, config)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(shell.serve(), name="serve")
            await process.stopping.wait()
            shell.mailbox.close()

    return run_process(Role.SCHEDULER, config, main)


def _recorder_of(process: Process, config: SchedulerConfig, core: SchedulerCore) -> Recorder | None:
    """The flight recorder, with its first segment begun; None where it is turned off."""
    if config.recordings_mb == 0:
        return None
    recorder = Recorder(
        config.recordings.expanduser(),
        core,
        config.limits(),
        process.instance_id,
        max_bytes=config.recordings_mb * 1_000_000,
        max_age_s=config.recordings_max_age_h * 3600,
    )
    recorder.begin(monotonic_ns())
    return recorder


class SchedulerShell:
    """Waits, calls and sends; decides nothing."""

    def __init__(self, process: Process, config: SchedulerConfig) -> None:
        self.mailbox = Mailbox()
        self._process = process
        self._core = SchedulerCore(config.limits())
        self._recorder = _recorder_of(process, config, self._core)
        self._fits = config.fits.expanduser()
        self._peers: dict[InstanceId, Peer] = {}
        self._encoders: dict[WorkerId, PlanEncoder] = {}
        self._spans = None if process.tracing is None else RequestSpans(process.tracing)
        self._delays = Delays(config.inject_delay)
        self._held_plans: deque[tuple[Peer, Plan]] = deque()  # behind an injected delay
        inbox = process.sockets.bind(
            config.bind,
            Endpoint(
                hello=process.hello(),
                peer_roles=frozenset({Role.TOKENIZER, Role.WORKER}),
                mailbox=self.mailbox,
            ),
        )
        REGISTRY.register(metrics.CoreCollector(self._core, self._recorder))
        self._watch = Watch(self._core)
        process.admin.pages.update(watch=self._watch.serve, explain=self._watch.explain)
        process.readiness.set_not_ready("no worker")
        log.info("scheduler_bound", address=inbox.address)

    async def serve(self) -> None:
        """Take events until the mailbox closes."""
        tune_garbage_collector()
        try:
            await self._take_events()
        finally:
            if self._recorder is not None:
                self._recorder.close()

    async def _take_events(self) -> None:
        async for event in self.mailbox:
            match event:
                case PeerUp():
                    self._greet(event.peer)
                case PeerDown():
                    self._part(event.peer, event.detail)
                case Received():
                    self._receive(event.peer, event.message)
                case TimerFired():
                    self._step(event)
                case _:
                    raise AssertionError(f"{event!r} in the scheduler's mailbox")
        self._save_fits()

    def _greet(self, peer: Peer) -> None:
        hello = peer.hello
        log.info("peer_joined", peer=hello.instance_id, peer_role=hello.role)
        if (former := self._peers.get(hello.instance_id)) is not None:
            # It came back before its old connection was seen to end.
            self._part(former, "it connected again")
        self._peers[hello.instance_id] = peer
        if hello.role is Role.TOKENIZER:
            if self._core.pool_card is not None:
                self._send(peer, self._core.pool_card)
        elif hello.worker is None:
            peer.drop("a worker's HELLO holds its card")
        else:
            worker_id = WorkerId(hello.instance_id)
            self._encoders[worker_id] = PlanEncoder()
            fit = load_fit(self._fits, hello.worker)
            self._step(WorkerJoined(worker_id=worker_id, card=hello.worker, fit=fit))

    def _part(self, peer: Peer, detail: str) -> None:
        instance_id = peer.hello.instance_id
        if self._peers.get(instance_id) is not peer:
            return  # An older connection of a peer that is here again.
        del self._peers[instance_id]
        log.warning("peer_left", peer=instance_id, peer_role=peer.hello.role, detail=detail)
        if peer.hello.role is Role.TOKENIZER:
            self._step(TokenizerLost(tokenizer_id=TokenizerId(instance_id)))
        else:
            self._encoders.pop(WorkerId(instance_id), None)
            self._save_fits()
            metrics.WORKERS_LOST.inc()
            self._step(WorkerLost(worker_id=WorkerId(instance_id), detail=detail))

    def _receive(self, peer: Peer, message: ActorMessage) -> None:
        if self._peers.get(peer.hello.instance_id) is not peer:
            return
        match peer.hello.role, message:
            case Role.TOKENIZER, RequestArrived() if message.tokenizer_id == peer.hello.instance_id:
                self._step(message)
            case Role.TOKENIZER, Cancel() | StopReached():
                self._step(message)
            case Role.WORKER, IterationDone() | PlanRefused():
                if isinstance(message, PlanRefused):
                    log.error("plan_refused", worker=peer.hello.instance_id, detail=message.detail)
                else:
                    metrics.note_result(message)
                    if self._watch.is_watched:
                        self._watch.note_result(WorkerId(peer.hello.instance_id), message, monotonic_ns())
                    log.debug(
                        "iteration_finished",
                        worker=peer.hello.instance_id,
                        epoch=message.epoch,
                        iteration=message.iteration,
                        waited_ms=round(ms(message.started_ns - message.received_ns), 2),
                        took_ms=round(ms(message.finished_ns - message.started_ns), 2),
                    )
                self._step(WorkerReported(worker_id=WorkerId(peer.hello.instance_id), report=message))
            case _:
                peer.drop(f"a {peer.hello.role} does not send this: {type(message).__name__}")

    def _save_fits(self) -> None:
        for worker in self._core.workers:
            save_fit(self._fits, worker)

    def _step(self, event: Event) -> None:
        if self._delays:
            self._delays.block("step")
        now_ns = monotonic_ns()
        try:
            effects = self._core.step(event, now_ns)
        except Exception:
            if self._recorder is not None:
                self._recorder.record(event, None, now_ns)
            raise
        for effect in effects:
            self._carry_out(effect, now_ns)
        # Last, so that no plan and no token waits for it.
        if self._recorder is not None:
            self._recorder.record(event, effects, now_ns)
        if self._spans is not None:
            if isinstance(event, RequestArrived) and self._core.is_open(event.request_id):
                self._spans.arrive(event, now_ns)
            for effect in effects:
                self._spans.note(effect, now_ns)

    def _carry_out(self, effect: Effect, now_ns: int) -> None:
        match effect:
            case RunIteration():
                plan = self._encoders[effect.worker_id].encode(effect)
                metrics.note_plan(effect)
                if self._watch.is_watched:
                    self._watch.note_plan(effect)
                log.debug(
                    "iteration_planned",
                    worker=effect.worker_id,
                    epoch=effect.epoch,
                    iteration=effect.iteration,
                    num_decodes=len(effect.decodes),
                    chunks=[(chunk.request_id, chunk.start, chunk.num_tokens) for chunk in effect.chunks],
                    predicted_ms=round(ms(effect.predicted_ns), 2),
                    allowed_ms=None if effect.allowed_ns is None else round(ms(effect.allowed_ns), 2),
                    bound=effect.bound,
                )
                if (worker := self._peers.get(effect.worker_id)) is not None:
                    self._send_plan(worker, plan)
            case SendStreams():
                if (tokenizer := self._peers.get(effect.tokenizer_id)) is not None:
                    self._send(tokenizer, _stamped(effect.batch))
                metrics.note_streams(effect)
            case PoolChanged():
                self._tell_pool(effect.card)
            case DismissWorker():
                log.error("worker_dismissed", worker=effect.worker_id, detail=effect.detail)
                if (worker := self._peers.get(effect.worker_id)) is not None:
                    worker.drop(effect.detail)
            case RequestPreempted():
                metrics.PREEMPTIONS.inc()
                metrics.RECOMPUTED_TOKENS.inc(effect.num_tokens)
                log.info("request_preempted", request_id=effect.request_id, num_tokens=effect.num_tokens)
            case RequestFinished():
                metrics.note_finished(effect)
                log.info(
                    "request_finished",
                    request_id=effect.request_id,
                    reason=effect.reason,
                    num_prompt_tokens=effect.num_prompt_tokens,
                    num_output_tokens=effect.num_output_tokens,
                    num_preemptions=effect.num_preemptions,
                    queue_ms=round(ms(effect.queue_ns), 3),
                )
            case WakeAt():
                self.mailbox.wake_at(TimerFired(), effect.due_ns, now_ns)
            case _:
                assert_never(effect)

    def _tell_pool(self, card: PoolCard) -> None:
        log.info(
            "pool_changed",
            model=card.model.name,
            num_workers=card.num_workers,
            kv_capacity=card.kv_capacity,
        )
        if card.num_workers:
            self._process.readiness.set_ready()
        else:
            self._process.readiness.set_not_ready("no worker")
        for peer in list(self._peers.values()):
            if peer.hello.role is Role.TOKENIZER:
                self._send(peer, card)

    def _send_plan(self, worker: Peer, plan: Plan) -> None:
        """Send it, unless a delay is injected: then it leaves later, and those behind it not before it."""
        if self._delays and not self._held_plans and (delay_ns := self._delays.pass_by("plan")):
            asyncio.get_running_loop().call_later(delay_ns / NS_PER_S, self._release_plans)
            self._held_plans.append((worker, plan))
        elif self._held_plans:
            self._held_plans.append((worker, plan))
        else:
            self._send(worker, plan)

    def _release_plans(self) -> None:
        while self._held_plans:
            self._send(*self._held_plans.popleft())

    def _send(self, peer: Peer, message: ActorMessage) -> None:
        """Send, or give the peer up: its PeerDown then sets its requests right."""
        try:
            peer.send(message)
        except LinkFull as full:
            # A hole in the stream of plans or tokens cannot be mended later, while a lost peer can be replaced.
            peer.drop(str(full))
        except PeerGone:
            pass  # Its PeerDown is in the mailbox.


def _stamped(batch: StreamBatch) -> StreamBatch:
    """The same batch, with the moment at which its tokens are passed on: what this process takes for them is its own
    part of their gaps."""
    if batch.stamps is None:
        return batch
    return replace(batch, stamps=replace(batch.stamps, scheduler_ns=monotonic_ns()))
