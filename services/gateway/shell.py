"""The gateway as a process: starts, serves, drains, stops."""

import asyncio

import structlog

from common.messages.links import Role
from common.process import Process, run_process, tune_garbage_collector
from services.gateway.config import GatewayConfig
from services.gateway.http.gateway import Gateway
from services.gateway.http.server import HttpServer
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger()


def run(config: GatewayConfig) -> int:
    """Serve until asked to stop; return the exit status."""

    async def main(process: Process) -> None:
        await serve(process, config)

    return run_process(Role.GATEWAY, config, main)


async def serve(process: Process, config: GatewayConfig) -> None:
    """Serve until process.stopping is set, then drain.

    Raises:
        OSError: If an address or a file that the operator named is no good.
    """
    gateway = Gateway(
        config,
        sockets=process.sockets,
        hello=process.hello(),
        readiness=process.readiness,
        metrics=GatewayMetrics(),
        tracing=process.tracing,
    )
    server = HttpServer(gateway)
    try:
        await server.start()
        tune_garbage_collector()
        async with asyncio.TaskGroup() as tasks:
            neighbours = tasks.create_task(gateway.ring.run(tasks), name="tokenizers")
            log.info("gateway_listening", url=server.url)
            await process.stopping.wait()
            server.stop_listening()
            await gateway.drain()
            neighbours.cancel()
            await server.close()
            gateway.ring.hang_up()
    except* OSError as group:
        # One address is enough to say; run_process prints it and exits with 2.
        raise _first(group) from None
    finally:
        await server.close()


def _first(group: BaseExceptionGroup[OSError]) -> OSError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, OSError)
    return error
