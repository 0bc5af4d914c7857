"""Commands between schedulers, through the ledger: what is asked here of a request that another scheduler has, and the reverse.

All that waits goes and is asked after in one statement, however many clients ask. Each command may be carried out twice and then
changes nothing more. Must not know: what commands mean, SQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Command, Lease

# An answer takes a turn of each: those who are asked look every LISTEN_S, those who ask every POLL_S.
LISTEN_S = 0.1
POLL_S = 0.05
OUTAGE_POLL_S = 0.5


class Relay:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._outbox: list[tuple[Command, asyncio.Future[None]]] = []
        # By number: who waits until the command is gone.
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._posted = asyncio.Event()

    async def ask(self, command: Command) -> None:
        """Returns once it was carried out, or fell with the scheduler it was for. It is withdrawn if the caller stops waiting."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._post(command, done)
        await done

    def tell(self, command: Command) -> None:
        """As `ask`, without waiting."""
        self._post(command, asyncio.get_running_loop().create_future())

    async def send(self) -> None:
        """Carries what is asked here, until cancelled."""
        while True:
            await self._posted.wait()
            try:
                await self._post_outbox()
                await asyncio.sleep(POLL_S)
                await self._collect()
            except LedgerUnavailable:
                await asyncio.sleep(OUTAGE_POLL_S)
            if not self._outbox and not self._asked:
                self._posted.clear()

    async def listen(
        self, lease: Lease, has_peers: Callable[[], bool], obey: Callable[[Sequence[Command]], Awaitable[None]]
    ) -> None:
        """Has `obey` carry out what others ask of this scheduler, until cancelled. What it raises Unavailable for comes again."""
        while True:
            await asyncio.sleep(LISTEN_S)
            if not has_peers():
                continue
            try:
                if received := await asyncio.to_thread(self._ledger.received, lease):
                    await obey([command for _, command in received])
                    await asyncio.to_thread(self._ledger.settle, [number for number, _ in received])
            except (LedgerUnavailable, Unavailable):
                await asyncio.sleep(OUTAGE_POLL_S)

    def _post(self, command: Command, done: asyncio.Future[None]) -> None:
        self._outbox.append((command, done))
        self._posted.set()

    async def _post_outbox(self) -> None:
        # Those who gave up while the ledger was away ask for nothing any more.
        sent = [(command, done) for command, done in self._outbox if not done.done()]
        self._outbox = []
        if not sent:
            return
        try:
            numbers = await asyncio.to_thread(self._ledger.send, [command for command, _ in sent])
        except LedgerUnavailable:
            self._outbox = sent + self._outbox
            raise
        self._asked.update(zip(numbers, (done for _, done in sent), strict=True))

    async def _collect(self) -> None:
        if not self._asked:
            return
        pending = await asyncio.to_thread(self._ledger.pending, list(self._asked))
        withdrawn = []
        for number, done in list(self._asked.items()):
            if number in pending and not done.done():
                continue
            del self._asked[number]
            if number in pending:
                withdrawn.append(number)
            elif not done.done():
                done.set_result(None)
        if withdrawn:
            await asyncio.to_thread(self._ledger.settle, withdrawn)
