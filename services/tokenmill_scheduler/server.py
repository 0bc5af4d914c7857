"""The scheduler put together: takes up what was left, serves until it is stopped, leaves nothing half told.

Must not know: how requests are scheduled or stored, that it is a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any

import structlog
from tokenmill_service.address import bound_address, is_open
from tokenmill_service.flags import SettingsError
from tokenmill_service.metrics import MetricsServer
from tokenmill_service.tls import channel_credentials, server_credentials

from tokenmill_scheduler.access import Access
from tokenmill_scheduler.core.events import QuotasChanged, WeightsChanged
from tokenmill_scheduler.core.scheduler import Scheduler
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.executors import Executors
from tokenmill_scheduler.exposition import Exposition
from tokenmill_scheduler.grpc_server import SERVICES, add_services, new_server
from tokenmill_scheduler.health import ALIVE_WITHIN_S, Health
from tokenmill_scheduler.idle import IdleClients
from tokenmill_scheduler.intake import Intake
from tokenmill_scheduler.journal.scheduler import JournaledScheduler
from tokenmill_scheduler.journal.writer import JournalWriter
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.writer import LedgerWriter
from tokenmill_scheduler.live import may_wait
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.loop_desk import LoopDesk
from tokenmill_scheduler.models import Models
from tokenmill_scheduler.operators import Operators
from tokenmill_scheduler.pacing import Repeats
from tokenmill_scheduler.peers import Peers
from tokenmill_scheduler.reads import RETRY_DELAY_S
from tokenmill_scheduler.recovery import take_up
from tokenmill_scheduler.retention import prune_for_ever
from tokenmill_scheduler.servicers.admin import AdminServicer
from tokenmill_scheduler.servicers.inference import InferenceServicer
from tokenmill_scheduler.servicers.statuses import SUBMIT_REFUSALS
from tokenmill_scheduler.session import SessionLimits
from tokenmill_scheduler.settings import Settings
from tokenmill_scheduler.shutdown import finish_steps, finish_writing

log = structlog.get_logger(__name__)

# What the last messages may take to reach their clients once all streams have ended.
LAST_WORDS_S = 1.0


class SchedulerServer:
    """The gRPC server and all behind it, over a ledger that the caller opens and closes."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        """Raises SettingsError when a file of certificates or tokens is not right, or the plan journal cannot be written."""
        self._settings = settings
        self._credentials = None if settings.tls is None else server_credentials(settings.tls)
        if settings.executor_tls is not None:
            # Each connection reads the files anew; that they are right is to be known now.
            channel_credentials(settings.executor_tls)
        self.access = Access(settings.auth_tokens, settings.tenant_limits)
        self._ledger = ledger
        self._writer = LedgerWriter(ledger, self._ledger_failed, interval_s=settings.commit_interval_s, may_wait=may_wait)
        self._models = Models()
        self._journal = _open_journal(settings)
        config = settings.scheduler
        scheduler = Scheduler(config) if self._journal is None else JournaledScheduler(config, self._journal)
        self.loop = Loop(
            scheduler,
            self._writer,
            lambda model: self._models.find(model).text,
            settings.reattach_grace_s,
            idle_clients=IdleClients(settings.idle_client_timeout_s),
        )
        self._exposition = Exposition(scheduler, self.loop, self._writer, SUBMIT_REFUSALS)
        self._metrics: MetricsServer | None = None
        self._health = Health(SERVICES, self._not_ready, self._not_alive)
        self.executors = Executors(
            settings.executors,
            self.loop,
            self._models,
            ledger,
            SessionLimits(settings.step_timeout_s, settings.heartbeat_timeout_s),
            settings.max_message_bytes,
            self._health.changed,
            settings.executor_tls,
            lambda executor: self.desk.handovers.executor_gone(executor),
            Repeats(settings.num_scheduler_steps, settings.commit_interval_s),
        )
        self.desk = LoopDesk(
            settings.queue_limits,
            self.loop,
            self._models,
            ledger,
            self._writer,
            self.access.limits,
            announce_s=settings.reattach_grace_s / 3,
            patience_s=settings.lease_time_s,
        )
        self._peers = Peers(
            settings,
            ledger,
            self.loop,
            self._writer,
            self.desk,
            self.executors,
            is_alive=lambda: not self._not_alive(),
            keep_at=self._keep_at,
        )
        self.operators = Operators(self.loop, ledger, self.desk.check_open)
        self._stopping = False
        refused = self.loop.metrics.refuse
        intake = Intake(self.desk, self.loop.clock, max_prompt_tokens=settings.max_prompt_tokens)
        self._inference = InferenceServicer(self.desk, intake, refused, settings.max_message_bytes)
        self._server = new_server(self.access, refused, settings.max_message_bytes)
        admin = AdminServicer(self.desk, self.operators, self.loop.clock)
        add_services(self._server, self._inference, admin, self._health.servicer)
        self._tasks: list[asyncio.Task[None]] = []
        self.address = ""

    async def start(self) -> None:
        """Raises SettingsError when the address cannot be had."""
        self.address = bound_address(self._settings.listen, self._bind())
        self._warn_of_open_doors()
        if self._settings.metrics_address:
            self._metrics = MetricsServer(self._settings.metrics_address, self._exposition)
            log.info("metrics served", address=self.metrics_address)
        self._use_quotas()
        lease, estate = await self._peers.take_lease(self.address)
        await self.operators.refresh()
        if not self._settings.is_alone:
            # What others' executors can hold is known before anything is found to be too long.
            await self.desk.handovers.look()
        take_up(self.loop, estate.requests)
        watches = [self.loop.tick(), self._health.watch(), self.access.watch(self._use_quotas), self.operators.watch()]
        if self._settings.retention_s:
            watches.append(prune_for_ever(self._ledger, self._settings.retention_s, self.loop.clock))
        for watch in watches:
            self._keep_at(watch)
        await self._server.start()
        self.executors.start(lease)
        if not self._settings.is_alone:
            self._peers.start(lease, estate)

    async def stop(self) -> None:
        """Plans that are out come back and are made durable; streams are told to attach again; requests stay in the ledger.

        Takes the grace period at most, and LAST_WORDS_S for each of those who are to hear of it.
        """
        # A loop that failed takes no results any more.
        until_s = time.monotonic() + (0.0 if self.loop.failure.done() else self._settings.grace_period_s)
        self._stopping = True
        self._peers.close()
        self.desk.close()
        await self._health.shut_down()
        await finish_steps(self.loop, until_s)
        await self.executors.leave(LAST_WORDS_S)
        await finish_writing(self._writer, max(until_s, time.monotonic() + LAST_WORDS_S))
        await self._peers.give_up_lease(LAST_WORDS_S)
        reason = Unavailable("the scheduler is shutting down; attach again", RETRY_DELAY_S)
        self.desk.close_streams(reason)
        with contextlib.suppress(TimeoutError):
            # gRPC alone would wait for a client that stands still, for 40 s.
            last_words = asyncio.gather(self._inference.close_streams(reason), self._server.stop(LAST_WORDS_S))
            await asyncio.wait_for(last_words, 2 * LAST_WORDS_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._journal is not None:
            await asyncio.to_thread(self._journal.close)
        if self._metrics is not None:
            await self._metrics.stop()

    @property
    def metrics_address(self) -> str:
        """Where Prometheus finds it; empty for nowhere."""
        return "" if self._metrics is None else self._metrics.address

    def _use_quotas(self) -> None:
        """Those that are in force now."""
        self.loop.handle(QuotasChanged(*self.access.quotas()))
        self.loop.handle(WeightsChanged(self.access.weights()))

    # ---- what goes on in the background ----------------------------------------------------------------------------------------

    def _keep_at(self, work: Coroutine[Any, Any, None]) -> None:
        """Until `stop`; a mistake in it ends the scheduler, since nobody would miss it otherwise."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._work_ended)
        self._tasks.append(task)

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.fail(error)

    # ---- its address -----------------------------------------------------------------------------------------------------------

    def _bind(self) -> int:
        listen, credentials = self._settings.listen, self._credentials
        try:
            if credentials is None:
                return self._server.add_insecure_port(listen)
            return self._server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise SettingsError(f"--listen {listen} cannot be bound: choose a free address") from error

    def _warn_of_open_doors(self) -> None:
        if not is_open(self.address):
            return
        if self._credentials is None:
            log.warning("requests and tokens pass in plain text: give --tls-cert and --tls-key, or keep the network private")
        if not self.access.needs_token:
            log.warning("whoever reaches this address may use and operate the service: give --auth-tokens, or keep it private")

    # ---- how it is -------------------------------------------------------------------------------------------------------------

    def _ledger_failed(self, error: Exception) -> None:
        self.loop.fail(error)

    def _not_ready(self) -> str:
        if self._stopping:
            return "shutting down"
        if self._writer.outage is not None:
            return f"the database cannot be written: {self._writer.outage}"
        return "" if self.executors.any_connected else "no executor is connected"

    def _not_alive(self) -> str:
        if self.loop.failure.done():
            return "the loop has failed"
        return "" if self.loop.clock() - self.loop.ticked_s < ALIVE_WITHIN_S else "the loop stands still"


def _open_journal(settings: Settings) -> JournalWriter | None:
    """Raises SettingsError."""
    if settings.plan_journal is None:
        return None
    try:
        return JournalWriter(settings.plan_journal, settings.scheduler, settings.plan_journal_bytes)
    except OSError as error:
        raise SettingsError(f"--plan-journal {settings.plan_journal} cannot be written: {error.strerror}") from error
