"""The tokenizer's process: sockets, threads and a clock around the core."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import assert_never

import structlog
from msgspec.structs import replace
from prometheus_client import Counter, Gauge, Histogram

from common.actor.mailbox import Mailbox
from common.clock import NS_PER_S, monotonic_ns, ms
from common.ids import TokenizerId
from common.injection import Delays
from common.messages import (
    ActorMessage,
    Cancel,
    Decode,
    Encode,
    PoolCard,
    RequestArrived,
    StreamBatch,
    Submit,
    TextBatch,
)
from common.messages.links import Role
from common.process import Process, run_process, tune_garbage_collector
from common.traceparent import is_sampled
from common.wire.link import LinkFull, Peer, PeerDown, PeerGone, PeerUp, Received
from common.wire.session import Endpoint
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.core import Limits, TokenizerCore
from services.tokenizer.events import (
    ArrivalNotSent,
    DropGateway,
    DropJob,
    DropScheduler,
    Effect,
    Event,
    FromGateway,
    FromScheduler,
    GatewayDown,
    GatewayLink,
    GatewayUp,
    JobDone,
    SchedulerDown,
    SchedulerUp,
    StartJob,
    ToGateway,
    ToScheduler,
)
from services.tokenizer.jobs import EncodedIds, JobId, JobResult, Prepared
from services.tokenizer.text.model_tokenizer import ModelTokenizer
from services.tokenizer.threads import JobEnded, Threads

log = structlog.get_logger()

MAX_CREDIT_RESERVE = 64
"""Messages of the scheduler's window that RequestArrived may not use (a quarter of a small window), so that Cancel and
StopReached, which free room, still pass when requests fill the link."""

OPEN_REQUESTS = Gauge("legato_tokenizer_open_requests", "Requests whose terminal message is still to come")
PROMPT_TOKENS = Counter("legato_tokenizer_prompt_tokens_total", "Tokens of prompts encoded")
OUTPUT_TOKENS = Counter("legato_tokenizer_output_tokens_total", "Tokens received from the scheduler to become text")
ENCODE_SECONDS = Histogram(
    "legato_tokenizer_encode_seconds",
    "Time that a thread took to encode a prompt",
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2),
)


def run(config: TokenizerConfig) -> int:
    """Run a tokenizer until it is asked to stop; return the exit status."""
    return run_process(Role.TOKENIZER, config, partial(_main, config=config))


async def _main(process: Process, config: TokenizerConfig) -> None:
    started_ns = monotonic_ns()
    model = await asyncio.to_thread(
        ModelTokenizer.load, config.model, config.chat_template, max_rendered_chars=config.max_rendered_chars
    )
    log.info("tokenizer_loaded", model=config.model, load_ms=round(ms(monotonic_ns() - started_ns)))
    tune_garbage_collector()
    mailbox = Mailbox()
    threads = Threads(config.encode_threads, model, mailbox)
    core = TokenizerCore(
        TokenizerId(process.instance_id),
        Limits(max_open_requests=config.max_open_requests, max_waiting_jobs=config.max_waiting_encodes),
    )
    shell = Shell(process, core, mailbox, threads, Delays(config.inject_delay))

    def endpoint(peer_role: Role) -> Endpoint:
        return Endpoint(hello=process.hello(), peer_roles=frozenset({peer_role}), mailbox=mailbox)

    inbox = process.sockets.bind(config.bind, endpoint(Role.GATEWAY))
    process.sockets.dial(config.scheduler, endpoint(Role.SCHEDULER))
    log.info("inbox_bound", address=inbox.address, scheduler=config.scheduler)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_close_when_stopping(process, mailbox), name="stop")
            tasks.create_task(shell.serve(), name="events")
    finally:
        threads.close()


async def _close_when_stopping(process: Process, mailbox: Mailbox) -> None:
    await process.stopping.wait()
    mailbox.close()


class Shell:
    """Feeds events to the core, and carries out its effects."""

    def __init__(
        self, process: Process, core: TokenizerCore, mailbox: Mailbox, threads: Threads, delays: Delays
    ) -> None:
        self._readiness = process.readiness
        self._core = core
        self._mailbox = mailbox
        self._threads = threads
        self._delays = delays
        self._tracing = process.tracing
        self._encodes: dict[JobId, tuple[Submit, int]] = {}  # of sampled requests: what, and since when
        self._scheduler: Peer | None = None
        self._gateways: dict[GatewayLink, Peer] = {}
        self._link_of: dict[Peer, GatewayLink] = {}
        self._num_gateways = 0

    async def serve(self) -> None:
        """Handle what is in the mailbox until that is closed."""
        self._tell_readiness()
        async for event in self._mailbox:
            match event:
                case Received(peer, message):
                    self._receive(peer, message)
                case PeerUp(peer):
                    self._open(peer)
                case PeerDown(peer, detail):
                    self._lose(peer, detail)
                case JobEnded(job_id, future):
                    self._end_job(job_id, future)
            OPEN_REQUESTS.set(self._core.num_open)

    def _receive(self, peer: Peer, message: ActorMessage) -> None:
        match message:
            case StreamBatch() if peer is self._scheduler:
                OUTPUT_TOKENS.inc(sum(len(sampled.token_ids) for sampled in message.sampled))
                self._step(FromScheduler(message))
            case PoolCard() if peer is self._scheduler:
                self._step(FromScheduler(message))
                log.info("pool_changed", model=message.model.name, num_workers=message.num_workers)
                self._tell_readiness()
            case Submit() | Cancel() | Encode() | Decode() if peer in self._link_of:
                self._step(FromGateway(self._link_of[peer], message))
            case _:
                peer.drop(f"a {peer.hello.role} has no {type(message).__name__} to send to a tokenizer")

    def _open(self, peer: Peer) -> None:
        log.info("peer_connected", peer=peer.hello.instance_id)
        if peer.hello.role is Role.SCHEDULER:
            self._scheduler = peer
            self._step(SchedulerUp())
            self._tell_readiness()
            return
        gateway = GatewayLink(self._num_gateways)
        self._num_gateways += 1
        self._gateways[gateway] = peer
        self._link_of[peer] = gateway
        self._step(GatewayUp(gateway))

    def _lose(self, peer: Peer, detail: str) -> None:
        num_open = self._core.num_open
        if peer is self._scheduler:
            self._scheduler = None
            self._step(SchedulerDown(detail))
            self._tell_readiness()
        else:
            gateway = self._link_of.pop(peer)
            del self._gateways[gateway]
            self._step(GatewayDown(gateway))
        num_lost = num_open - self._core.num_open
        log.info("peer_lost", peer=peer.hello.instance_id, detail=detail, num_requests=num_lost)

    def _end_job(self, job_id: JobId, future: "Future[tuple[JobResult, int]]") -> None:
        self._threads.forget(job_id)
        encode = self._encodes.pop(job_id, None)
        if future.cancelled():
            self._step(JobDone(job_id, None))
            return
        result, duration_ns = future.result()  # Raises what the job raised: a bug of ours, which ends the process.
        match result:
            case Prepared():
                ENCODE_SECONDS.observe(duration_ns / NS_PER_S)
                PROMPT_TOKENS.inc(len(result.prompt_ids))
                if encode is not None:
                    self._write_span(*encode, len(result.prompt_ids), duration_ns)
            case EncodedIds():
                ENCODE_SECONDS.observe(duration_ns / NS_PER_S)
                PROMPT_TOKENS.inc(result.num_tokens)
        self._step(JobDone(job_id, result))

    def _step(self, event: Event) -> None:
        for effect in self._core.step(event):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case ToGateway(gateway, message):
                if isinstance(message, TextBatch) and message.deltas:
                    if self._delays:
                        self._delays.block("text")
                    message = stamped(message, monotonic_ns())
                self._send_to_gateway(gateway, message)
            case ToScheduler(RequestArrived() as arrival):
                self._send_arrival(arrival)
            case ToScheduler(message):
                self._send_to_scheduler(message)
            case StartJob(job):
                if (
                    self._tracing is not None
                    and isinstance(job.message, Submit)
                    and is_sampled(job.message.traceparent)
                ):
                    self._encodes[job.job_id] = (job.message, monotonic_ns())
                self._threads.start(job)
            case DropJob(job_id):
                self._threads.drop(job_id)
            case DropGateway(gateway, detail):
                self._drop_gateway(gateway, detail)
            case DropScheduler(detail):
                if self._scheduler is not None:
                    self._scheduler.drop(detail)
            case _:
                assert_never(effect)

    def _write_span(self, submit: Submit, began_ns: int, num_tokens: int, encode_ns: int) -> None:
        assert self._tracing is not None, "encodes are noted for spans alone"
        self._tracing.write(
            "tokenize",
            submit.traceparent,
            began_ns,
            monotonic_ns(),
            {
                "legato.request_id": submit.choices[0].request_id,
                "legato.prompt_tokens": num_tokens,
                "legato.encode_ms": ms(encode_ns),
            },
        )

    def _send_to_gateway(self, gateway: GatewayLink, message: ActorMessage) -> None:
        if (peer := self._gateways.get(gateway)) is None:
            return
        _send(peer, message, lambda full: self._drop_gateway(gateway, f"it does not take its text: {full}"))

    def _drop_gateway(self, gateway: GatewayLink, detail: str) -> None:
        """End a gateway's link; its requests are cancelled when the PeerDown comes."""
        if (peer := self._gateways.get(gateway)) is not None:
            peer.drop(detail)

    def _send_arrival(self, arrival: RequestArrived) -> None:
        scheduler = self._scheduler
        if scheduler is None:
            return
        if scheduler.num_free <= min(MAX_CREDIT_RESERVE, scheduler.hello.window // 4):
            self._step(ArrivalNotSent(arrival.request_id, "the link to the scheduler is full"))
            return
        _send(
            scheduler, arrival, lambda full: self._step(ArrivalNotSent(arrival.request_id, f"no room to send: {full}"))
        )

    def _send_to_scheduler(self, message: ActorMessage) -> None:
        if (scheduler := self._scheduler) is not None:
            # Without its Cancels the scheduler would go on for nobody. Dropping the link tells it all at once.
            _send(scheduler, message, lambda full: scheduler.drop(f"it does not take cancellations: {full}"))

    def _tell_readiness(self) -> None:
        if missing := self._core.missing:
            self._readiness.set_not_ready(missing)
        else:
            self._readiness.set_ready()


def _send(peer: Peer, message: ActorMessage, when_full: Callable[[LinkFull], None]) -> None:
    try:
        peer.send(message)
    except LinkFull as full:
        when_full(full)
    except PeerGone:
        pass  # Its PeerDown is on its way, and the core acts on that.


def stamped(batch: TextBatch, now_ns: int) -> TextBatch:
    """The same batch, with the moment at which its text was ready. Deltas of a batch share their stamps."""
    stamps_of = {id(delta.stamps): replace(delta.stamps, tokenizer_ns=now_ns) for delta in batch.deltas}
    return replace(batch, deltas=tuple(replace(delta, stamps=stamps_of[id(delta.stamps)]) for delta in batch.deltas))
