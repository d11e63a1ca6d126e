"""The process of a simulated worker: one link to the scheduler, an alarm, and a device that is only time."""

import asyncio

import structlog

from common.actor.mailbox import Mailbox
from common.clock import monotonic_ns, ms
from common.injection import Delays
from common.messages.cards import ModelCard, WorkerCard
from common.messages.links import Role
from common.messages.plans import IterationDone, Plan, PlanRefused
from common.models import find_model
from common.process import Process, run_process, tune_garbage_collector
from common.wire.link import LinkFull, Peer, PeerDown, PeerGone, PeerUp, Received
from common.wire.session import Endpoint
from gpu_worker import metrics
from gpu_worker.config import WorkerConfig
from gpu_worker.iteration_spans import spans_of
from gpu_worker.simulated.alarm import new_alarm
from gpu_worker.simulated.device import Draw, Due, SimulatedDevice
from gpu_worker.simulated.facts import ModelFacts, read_facts
from gpu_worker.simulated.metrics import LATENESS_SECONDS
from gpu_worker.simulated.profiles import Profile, points_of, profile_named
from gpu_worker.slots import DEFAULT_BLOCK_SIZE, Limits

log = structlog.get_logger()

_DTYPES = {2: "bfloat16", 4: "float32"}
"""By bytes of a weight."""


def run(config: WorkerConfig) -> int:
    """Run a simulated worker until it is stopped; return the exit status."""
    return run_process(Role.WORKER, config, lambda process: _main(process, config))


async def _main(process: Process, config: WorkerConfig) -> None:
    assert config.profile is not None, "checked with the options"
    profile = profile_named(config.profile)
    facts = read_facts(find_model(config.model))
    card = card_of(config, profile, facts)
    log.info(
        "device_simulated",
        profile=profile.name,
        model=card.model.name,
        max_model_len=card.model.max_model_len,
        kv_tokens=card.num_blocks * card.block_size,
        num_words=len(facts.word_ids),
        iteration_ms={point.num_tokens: round(ms(point.iteration_ns), 1) for point in card.profile},
    )
    tune_garbage_collector()
    mailbox = Mailbox()
    process.readiness.set_not_ready(f"no scheduler at {config.scheduler}")
    process.sockets.dial(
        config.scheduler,
        Endpoint(hello=process.hello(card), peer_roles=frozenset({Role.SCHEDULER}), mailbox=mailbox),
    )
    worker = SimulatedWorker(process, config, card, profile, facts)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.serve(mailbox), name="mailbox")
            await process.stopping.wait()
            mailbox.close()
    finally:
        worker.close()


def card_of(config: WorkerConfig, profile: Profile, facts: ModelFacts) -> WorkerCard:
    """What the worker says of itself: time and memory of the profile, tokens of the model."""
    num_tokens = config.kv_tokens or profile.kv_tokens
    block_size = config.block_size or DEFAULT_BLOCK_SIZE
    return WorkerCard(
        model=ModelCard(
            name=config.served_model_name or facts.name,
            max_model_len=config.max_model_len or facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            has_penalties=True,  # Its words are noise, with and without.
        ),
        shape=profile.shape,
        device=f"simulated {profile.name}",
        device_kind=profile.device_kind,
        tensor_parallel=profile.tensor_parallel,
        dtype=_DTYPES.get(profile.shape.bytes_per_weight, "float32"),
        attention="simulated",
        is_batch_invariant=True,  # Tokens are a function of seed and position alone.
        block_size=block_size,
        num_blocks=num_tokens // block_size,
        max_num_slots=config.max_num_slots,
        max_chunk_tokens=config.max_chunk_tokens,
        profile=points_of(profile, config.max_chunk_tokens),
    )


class SimulatedWorker:
    """Hands plans to the device as they come, and results to the scheduler when their time is over."""

    def __init__(
        self, process: Process, config: WorkerConfig, card: WorkerCard, profile: Profile, facts: ModelFacts
    ) -> None:
        self._process = process
        self._config = config
        self._roofline = profile.roofline
        self._draw = Draw(facts.word_ids, facts.eos_token_ids, config.simulated_output_len)
        self._limits = Limits(
            vocab_size=card.model.vocab_size,
            max_model_len=card.model.max_model_len,
            block_size=card.block_size,
            num_blocks=card.num_blocks,
            max_num_slots=card.max_num_slots,
            max_chunk_tokens=card.max_chunk_tokens,
        )
        self._delays = Delays(config.inject_delay)
        self._spans = spans_of(process, config)
        self._alarm = new_alarm(self._report_due)
        self._peer: Peer | None = None
        self._device = self._new_device()

    async def serve(self, mailbox: Mailbox) -> None:
        """Take events until the mailbox closes."""
        async for event in mailbox:
            match event:
                case PeerUp():
                    self._peer = event.peer
                    self._process.readiness.set_ready()
                    log.info("scheduler_connected", scheduler=event.peer.hello.instance_id)
                case PeerDown() if event.peer is self._peer:
                    self._peer = None
                    self._device = self._new_device(self._device.free_ns)
                    self._process.readiness.set_not_ready(f"no scheduler at {self._config.scheduler}")
                    log.warning("scheduler_lost", detail=event.detail)
                case Received(message=Plan() as plan) if event.peer is self._peer:
                    self._submit(event.peer, plan)
                case Received() if event.peer is self._peer:
                    event.peer.drop(f"a worker takes plans, not {type(event.message).__name__}")

    def close(self) -> None:
        """Report nothing more."""
        self._peer = None
        self._alarm.close()

    def _new_device(self, free_ns: int = 0) -> SimulatedDevice:
        """Slots of a connection begin from nothing. An iteration that runs is not cut short, as on a real device."""
        return SimulatedDevice(self._limits, self._roofline, self._draw, free_ns, self._delays)

    def _submit(self, peer: Peer, plan: Plan) -> None:
        device = self._device
        if device.num_queued >= self._config.max_queued_plans:
            peer.drop(f"more than {self._config.max_queued_plans} plans wait for the device")
            return
        if self._spans is not None:
            self._spans.keep(plan)
        was_idle = device.next_due_ns is None
        device.submit(plan, received_ns=monotonic_ns())
        metrics.SLOTS_IN_USE.set(device.num_slots_in_use)
        if was_idle and device.next_due_ns is not None:
            self._alarm.set(device.next_due_ns)

    def _report_due(self) -> None:
        """The alarm has rung: send what is there, and set it for what comes next."""
        if self._peer is None:
            return  # It was set for a scheduler that is gone.
        while (due := self._device.take(monotonic_ns())) is not None:
            _send(self._peer, due.result)
            _count(due)
            if self._spans is not None and isinstance(due.result, IterationDone):
                self._spans.finish(due.result)
        if self._device.next_due_ns is not None:
            self._alarm.set(self._device.next_due_ns)


def _send(peer: Peer, result: IterationDone | PlanRefused) -> None:
    try:
        peer.send(result)
    except LinkFull as full:
        peer.drop(str(full))  # A missing result would leave the scheduler waiting: better that it sees a loss.
    except PeerGone:
        pass  # Its PeerDown is on its way.


def _count(due: Due) -> None:
    """After the sending, which should not wait for it."""
    lateness_ns = monotonic_ns() - due.at_ns
    match due.result:
        case IterationDone() as done:
            LATENESS_SECONDS.observe(lateness_ns / 1e9)
            metrics.ITERATIONS.inc()
            metrics.TOKENS_COMPUTED.inc(due.num_tokens)
            metrics.ITERATION_SECONDS.observe(done.device_ns / 1e9)
            log.debug(
                "iteration_finished",
                epoch=done.epoch,
                iteration=done.iteration,
                num_sampled=len(done.slots),
                device_ms=ms(done.device_ns),
                late_ms=ms(lateness_ns),
            )
        case PlanRefused() as refused:
            metrics.PLANS_REFUSED.inc()
            log.warning("plan_refused", epoch=refused.epoch, iteration=refused.iteration, detail=refused.detail)
