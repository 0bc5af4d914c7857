"""This scheduler among others of its database: holds its lease, takes over from those who fall, has and answers their questions.

Must not know: SQL, how requests are scheduled.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from tokenmill_scheduler.executors import Executors
from tokenmill_scheduler.lease import LeaseKeeper, take_lease
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Estate, Lease
from tokenmill_scheduler.ledger.writer import LedgerWriter
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.loop_desk import LoopDesk
from tokenmill_scheduler.recovery import take_up
from tokenmill_scheduler.settings import Settings

log = structlog.get_logger(__name__)


class Peers:
    """`is_alive`: this scheduler may keep its lease. `keep_at` sees to work until the scheduler stops."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        loop: Loop,
        writer: LedgerWriter,
        desk: LoopDesk,
        executors: Executors,
        is_alive: Callable[[], bool],
        keep_at: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._loop = loop
        self._writer = writer
        self._desk = desk
        self._executors = executors
        self._is_alive = is_alive
        self._keep_at = keep_at
        self._lease: Lease | None = None
        self._keeper: LeaseKeeper | None = None
        self._closed = False

    async def take_lease(self, address: str) -> tuple[Lease, Estate]:
        """From here on this scheduler, which serves at `address`, may write. With what an earlier process has left."""
        settings = self._settings
        name = settings.scheduler_name or f"{socket.gethostname()} {address}"
        take = partial(take_lease, alone=settings.is_alone, told=settings.executors)
        lease, estate = await asyncio.to_thread(take, self._ledger, name, settings.lease_time_s)
        self._lease = lease
        self._writer.start(lease)
        self._desk.open(lease)
        log.info("lease taken", scheduler=name, lease=lease.number)
        return lease, estate

    def start(self, lease: Lease, estate: Estate) -> None:
        """Keeps the lease, takes over from those who fall, and has and answers questions about each other's requests."""
        self._executors.inherit([address for _, address in estate.executors])
        self._keeper = keeper = LeaseKeeper(self._ledger, lease, self._settings.lease_time_s, self._is_alive)
        keeper.start(self._inherit, self._loop.fail)
        desk, relay = self._desk, self._desk.relay
        listening = relay.listen(lease, lambda: bool(keeper.peers), desk.obey)
        for work in (desk.followers.run(), desk.handovers.watch(), relay.send(), listening):
            self._keep_at(work)

    def close(self) -> None:
        """What others leave from here on is the next one's, with what this one leaves."""
        self._closed = True

    async def give_up_lease(self, timeout_s: float) -> None:
        """Whoever is there may take over at once."""
        if self._keeper is not None:
            await self._keeper.stop(timeout_s)
        if self._lease is not None:
            with contextlib.suppress(LedgerUnavailable):
                await asyncio.to_thread(self._ledger.give_up_lease, self._lease)

    def _inherit(self, estate: Estate) -> None:
        if not self._closed and not self._loop.failure.done():
            self._executors.inherit([address for _, address in estate.executors])
            take_up(self._loop, estate.requests, self._desk.followers.hand_over)
