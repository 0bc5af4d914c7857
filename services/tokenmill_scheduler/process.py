"""The scheduler as a process: serves until told to stop, and says by its exit code how it ended. Must not know: what it serves."""

from __future__ import annotations

import asyncio
import signal

import structlog
from tokenmill_service.address import lock_address, write_port_file
from tokenmill_service.collector import keep_collector_off_the_hot_path

from tokenmill_scheduler.health import LIVENESS
from tokenmill_scheduler.ledger.errors import LeaseLost
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.server import SchedulerServer
from tokenmill_scheduler.session import Fenced
from tokenmill_scheduler.settings import Settings

log = structlog.get_logger(__name__)


async def serve(settings: Settings, ledger: Ledger) -> int:
    """Runs until SIGTERM or SIGINT (0) or until the loop fails (1). Raises SettingsError for an operator's mistake."""
    told_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told_to_stop.set)
    lock_address(settings.listen)
    server = SchedulerServer(settings, ledger)
    await server.start()
    if settings.port_file is not None:
        write_port_file(settings.port_file, server.address)
    log.info("listening", address=server.address, executors=list(settings.executors), liveness_service=LIVENESS)
    keep_collector_off_the_hot_path()
    server.loop.failure.add_done_callback(lambda _: told_to_stop.set())
    await told_to_stop.wait()
    error = server.loop.failure.exception() if server.loop.failure.done() else None
    if isinstance(error, LeaseLost | Fenced):
        log.critical("fenced", reason=str(error))
    elif error is not None:
        log.critical("the loop failed; requests are in the ledger", exc_info=error)
    log.info("stopping")
    await server.stop()
    log.info("stopped")
    return 1 if error is not None else 0
