"""What every process shares: its options, its start, its admin port, and its orderly end."""

import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import structlog
import uvloop

from common.admin import AdminServer, Readiness
from common.config import option
from common.ids import InstanceId, new_instance_id
from common.injection import Delays
from common.messages.cards import WorkerCard
from common.messages.links import Hello, Role
from common.metrics import watch_loop
from common.supervision import bound_end_of_orphan, follow_supervisor
from common.telemetry import set_up_logging, start_exporting
from common.tracing import Tracing
from common.wire.session import DEFAULT_WINDOW, MAX_WINDOW
from common.wire.zmq_link import Sockets
from common.wire.zmq_socket import LinkKeys, LinkSettings

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Options that every process has."""

    keys: Path | None = option(None, "CURVE keys of the ring, made by `legato keys new`; needed beyond loopback")
    link_window: int = option(DEFAULT_WINDOW, "messages that a neighbour may send before this process has taken any")
    heartbeat_timeout_ms: int = option(2000, "silence after which a neighbour counts as lost")
    admin_host: str = option("127.0.0.1", "address of the admin port (health, metrics)")
    admin_port: int = option(0, "admin port; 0 takes a free one and logs it")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least level that is logged")
    log_format: Literal["json", "text"] = option("json", "json for machines, text for people")

    otlp_endpoint: str = option(
        "", "collector that takes spans by OTLP over HTTP, such as http://127.0.0.1:4318; none: no traces"
    )
    trace_share: float | None = option(
        None,
        "of the requests that come without a trace, how many are traced (default: OTEL_TRACES_SAMPLER, or all)",
    )
    inject_delay: str = option("", "delays for tests: SITE:MS:EVERY (docs/stalls.md)", is_hidden=True)

    def __post_init__(self) -> None:
        Delays(self.inject_delay)
        if self.trace_share is not None and not 0 <= self.trace_share <= 1:
            raise ValueError(f"--trace-share is {self.trace_share:g}; it must lie between 0 and 1")
        if not 8 <= self.link_window <= MAX_WINDOW:
            raise ValueError(f"--link-window is {self.link_window}; it must lie between 8 and {MAX_WINDOW}")
        if self.heartbeat_timeout_ms < 100:
            raise ValueError(f"--heartbeat-timeout-ms is {self.heartbeat_timeout_ms}; the least is 100")


class Process:
    """The running process: its identity, its sockets, its readiness, and whether it has been asked to stop."""

    def __init__(self, role: Role, config: ProcessConfig) -> None:
        self.role = role
        self.config = config
        self.instance_id: InstanceId = new_instance_id(role)
        self.readiness = Readiness()
        self.stopping = asyncio.Event()
        self.admin = AdminServer(config.admin_host, config.admin_port, self.readiness)
        self.tracing: Tracing | None = None
        self.sockets = Sockets(
            LinkSettings(
                keys=None if config.keys is None else read_keys(config.keys),
                heartbeat_interval_ms=config.heartbeat_timeout_ms // 4,
                heartbeat_timeout_ms=config.heartbeat_timeout_ms,
            )
        )

    def hello(self, worker: WorkerCard | None = None, rank: int | None = None) -> Hello:
        """This process's HELLO."""
        return Hello(
            role=self.role, instance_id=self.instance_id, window=self.config.link_window, worker=worker, rank=rank
        )


def run_process(role: Role, config: ProcessConfig, main: Callable[[Process], Awaitable[None]]) -> int:
    """Run main until it returns or a signal asks it to stop; return the exit status.

    main must return soon after process.stopping is set. SIGINT and SIGTERM set it; a second one ends the process.
    """
    follow_supervisor(role)

    async def serve() -> None:
        process = Process(role, config)
        set_up_logging(role, process.instance_id, config.log_level, config.log_format)
        exporting = start_exporting(role, process.instance_id, config.otlp_endpoint, config.trace_share)
        process.tracing = None if exporting is None else exporting.tracing
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, _ask_to_stop, process)
        lag = asyncio.create_task(watch_loop(), name="loop lag")
        try:
            await process.admin.start()
            log.info("process_started", admin=process.admin.url)
            await main(process)
        finally:
            lag.cancel()
            await process.admin.stop()
            process.sockets.close()
            if exporting is not None:
                exporting.close()
            log.info("process_stopped")

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
    except (OSError, msgspec.ValidationError) as error:  # Addresses and files that the operator named.
        print(f"legato {role}: {error}", file=sys.stderr)
        return 2
    return 0


def tune_garbage_collector() -> None:
    """Call once, when everything that lives for ever is loaded.

    What exists now is never scanned again, and young objects are scanned in larger batches: a full collection of a
    loaded process takes tens of milliseconds, each of them a gap in every stream.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def read_keys(path: Path) -> LinkKeys:
    """Return the key pair that write_keys wrote.

    Raises:
        OSError: If the file cannot be read.
        msgspec.ValidationError: If it is no key file.
    """
    return msgspec.toml.decode(path.read_bytes(), type=LinkKeys)


def write_keys(path: Path, keys: LinkKeys) -> None:
    """Write the key pair to a new file that only its owner can read.

    Raises:
        FileExistsError: If the file is there already: a ring whose keys change under it falls apart.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(f'public = "{keys.public}"\nsecret = "{keys.secret}"\n')


def _ask_to_stop(process: Process) -> None:
    if process.stopping.is_set():
        raise SystemExit(130)
    log.info("stop_requested")
    bound_end_of_orphan()
    process.stopping.set()
