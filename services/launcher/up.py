"""`legato up`: the whole system on one machine."""

import asyncio
import dataclasses
import os
import signal
import sys
import time
from dataclasses import dataclass

import aiohttp
import structlog
import uvloop

from common.config import flag_of
from common.ids import new_instance_id
from common.models import ModelNotFound, find_model
from common.ports import LOOPBACK, free_ports
from common.supervision import supervised_environ
from common.telemetry import set_up_logging
from services.launcher.config import UpConfig
from services.launcher.supervisor import Child, ChildBroken, keep_running, kill_all, legato_argv, stop_all

log = structlog.get_logger()

READY_POLL_S = 0.1
READY_REQUEST_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Ring:
    """The children, by stage of the ring from the clients down."""

    scheduler_admin: str  # URL
    gateway: Child
    tokenizers: list[Child]
    scheduler: Child
    workers: list[Child]

    @property
    def stages(self) -> list[list[Child]]:
        """The order in which they stop: the gateway lets its streams finish while the others still serve them."""
        return [[self.gateway], [*self.tokenizers, self.scheduler, *self.workers]]

    @property
    def children(self) -> list[Child]:
        return [child for stage in self.stages for child in stage]


def run(config: UpConfig, config_file: str | None = None) -> int:
    """Serve until a signal; return the exit status."""
    try:
        model_name = config.served_model_name or find_model(config.model).name
    except ModelNotFound as error:
        print(f"legato up: {error}", file=sys.stderr)
        return 2
    set_up_logging("up", new_instance_id("up"), config.log_level, config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, config_file, model_name))


async def _serve(config: UpConfig, config_file: str | None, model_name: str) -> int:
    ring = ring_of(config, config_file)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask_to_stop() -> None:
        if stopping.is_set():  # The second time is meant.
            kill_all(ring.children)
        stopping.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, ask_to_stop)
    status = 0
    keepers = [asyncio.create_task(keep_running(child), name=child.name) for child in ring.children]
    announcer = asyncio.create_task(_announce(config, model_name, ring.scheduler_admin), name="announce")
    stop = asyncio.create_task(stopping.wait(), name="stop")
    done, _ = await asyncio.wait([*keepers, stop], return_when=asyncio.FIRST_COMPLETED)
    for keeper in done - {stop}:
        if (error := keeper.exception()) is not None:
            log.error("system_broken", error=str(error))
            status = 1
            if not isinstance(error, ChildBroken):
                kill_all(ring.children)
                raise error
    announcer.cancel()
    stop.cancel()
    await stop_all(ring.stages, config.stop_timeout_s)
    for keeper in keepers:
        keeper.cancel()
    await asyncio.gather(*keepers, announcer, stop, return_exceptions=True)
    log.info("system_stopped")
    return status


def ring_of(config: UpConfig, config_file: str | None) -> Ring:
    """Every process with its options. Ports between them are free ones of the loopback interface, the same for each
    life of a process."""
    admin_port, *ports = free_ports(2 + config.tokenizers)
    scheduler_address, *tokenizer_addresses = (f"tcp://{LOOPBACK}:{port}" for port in ports)
    shared = [
        *_given(config, "log_level", "log_format", "otlp_endpoint"),
        *(("--config", config_file) if config_file else ()),
    ]
    shared += ["--admin-host", LOOPBACK]
    gateway = ["--host", config.host, "--port", str(config.port), "--tokenizers", ",".join(tokenizer_addresses)]
    gateway += ["--scheduler-admin", f"http://{LOOPBACK}:{admin_port}", "--admin-port", "0"]
    scheduler = ["--bind", scheduler_address, "--admin-port", str(admin_port)]
    scheduler += _given(config, "tbt_target_ms", "policy", "token_budget", "depth")
    worker = ["--scheduler", scheduler_address, "--model", config.model, "--admin-port", "0"]
    worker += _given(config, "served_model_name", "device", "profile", "dtype", "kv_tokens", "tp", "pp")
    worker += _given(config, "attention_backend", "kernels", "weights", "deterministic")
    on_gpus = config.device == "cuda"
    num_processes = config.workers * config.tp * config.pp
    worker += ["--threads", str(config.threads or max(1, (os.cpu_count() or 1) // num_processes))]

    def child(name: str, command: str, flags: list[str]) -> Child:
        return Child(name, legato_argv(command, [*flags, *shared]), supervised_environ())

    return Ring(
        scheduler_admin=f"http://{LOOPBACK}:{admin_port}",
        gateway=child("gateway", "gateway", gateway),
        tokenizers=[
            child(
                f"tokenizer-{index}",
                "tokenizer",
                [
                    *("--bind", address, "--scheduler", scheduler_address),
                    *("--model", config.model, "--admin-port", "0"),
                ],
            )
            for index, address in enumerate(tokenizer_addresses)
        ],
        scheduler=child("scheduler", "scheduler", scheduler),
        workers=[
            # Each on GPUs of its own: its first one, and the next for its other ranks.
            child(f"worker-{index}", "worker", [*worker, *(["--device-index", str(first)] if on_gpus else [])])
            for index, first in enumerate(range(0, num_processes, config.tp * config.pp))
        ],
    )


def _given(config: UpConfig, *names: str) -> list[str]:
    """Flags of the options that the operator gave here; the others stay open to the process's own table and default."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    argv: list[str] = []
    for name in names:
        if (value := getattr(config, name)) != fields[name].default:
            argv += [flag_of(name), str(value)]
    return argv


async def _announce(config: UpConfig, model_name: str, scheduler_admin: str) -> None:
    """Say that the system is ready, and how to use it."""
    began = time.monotonic()
    url = f"http://{'127.0.0.1' if config.host in ('0.0.0.0', '::') else config.host}:{config.port}"
    timeout = aiohttp.ClientTimeout(total=READY_REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            try:
                async with session.get(f"{url}/health/ready") as response:
                    if response.status == 200:
                        break
            except (aiohttp.ClientError, TimeoutError):
                pass  # Not up yet.
            await asyncio.sleep(READY_POLL_S)
    body = '{"model": "%s", "stream": true, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    print(
        f"\nLegato serves {model_name} at {url} (ready after {time.monotonic() - began:.1f} s). Try:\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{body % model_name}'\n\nWatch it at {url}/console, or ask it why:\n\n"
        f"  legato explain --admin {scheduler_admin}\n\n"
        "Ctrl-C stops it.\n",
        flush=True,
    )
