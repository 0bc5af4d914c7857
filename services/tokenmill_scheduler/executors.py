"""The executors this scheduler was told of or has inherited: one link each, and what it means when they come and go.

Must not know: requests, protobuf.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from tokenmill_service.tls import ClientTls

from tokenmill_scheduler.core.events import ExecutorsAwaited
from tokenmill_scheduler.core.plans import ExecutorDescription, Result
from tokenmill_scheduler.drive import Drive
from tokenmill_scheduler.ledger.errors import ExecutorTaken, LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Lease
from tokenmill_scheduler.link import ExecutorLink, Refused
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.models import Models
from tokenmill_scheduler.pacing import ONE_STEP, Pacer, Repeats
from tokenmill_scheduler.session import Fenced, SessionLimits
from tokenmill_scheduler.wire import ExecutorFacts, Standing

PIPELINE_DEPTH = 2


class Executors:
    """The `LinkOwner` of all links. `changed` is called when an executor has come or gone."""

    def __init__(
        self,
        addresses: Sequence[str],
        loop: Loop,
        models: Models,
        ledger: Ledger,
        limits: SessionLimits,
        max_message_bytes: int,
        changed: Callable[[], None],
        tls: ClientTls | None = None,
        given_away: Callable[[ExecutorDescription], None] = lambda executor: None,
        repeats: Repeats = ONE_STEP,
    ) -> None:
        """`given_away` is called with an executor that was, or was to be, driven here and is another scheduler's."""
        self._open_link = partial(ExecutorLink, owner=self, limits=limits, max_message_bytes=max_message_bytes, tls=tls)
        self.links = [self._open_link(address) for address in addresses]
        self._loop = loop
        self._models = models
        self._ledger = ledger
        self._changed = changed
        self._given_away = given_away
        self._repeats = repeats
        self._claims: dict[str, ExecutorLink] = {}
        self._drives: dict[ExecutorLink, Drive] = {}
        # Addresses of executors that have neither been driven here nor found to be another scheduler's.
        self._awaited: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._lease: Lease
        self._log = structlog.get_logger(__name__)

    def start(self, lease: Lease) -> None:
        """Drives them under this lease."""
        self._lease = lease
        self._await([link.address for link in self.links])
        for link in self.links:
            self._run(link)

    def inherit(self, addresses: Sequence[str]) -> None:
        """Drives the executors of a fallen scheduler too, until one that was told of them is there.

        To be called before its requests are taken up: those that only these can hold are to wait for them.
        """
        driven = [link.address for link in self._drives]
        self._await([*self._awaited, *[address for address in addresses if address not in driven]])
        by_address = {link.address: link for link in self.links}
        for address in addresses:
            if address in by_address:
                by_address[address].hurry()
            else:
                link = self._open_link(address, inherited=True)
                self.links.append(link)
                self._run(link)

    def _run(self, link: ExecutorLink) -> None:
        task = asyncio.create_task(link.run())
        task.add_done_callback(partial(self._link_ended, link))
        self._tasks.append(task)

    def _await(self, addresses: Sequence[str]) -> None:
        self._awaited = list(dict.fromkeys(addresses))
        self._loop.handle(ExecutorsAwaited(tuple(self._awaited)))

    def _met(self, link: ExecutorLink) -> None:
        """What this executor can hold is known, or nobody's business here."""
        if link.address in self._awaited:
            self._await([address for address in self._awaited if address != link.address])

    async def leave(self, timeout_s: float) -> None:
        """Says goodbye to every executor, and ends the links that take longer than this."""
        tasks = list(self._tasks)
        for link in self.links:
            link.leave()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def any_connected(self) -> bool:
        return bool(self._drives)

    # ---- LinkOwner -------------------------------------------------------------------------------------------------------------

    def claim(self, link: ExecutorLink, facts: ExecutorFacts) -> None:
        name = facts.description.name
        other = self._claims.get(name)
        if other is not None and other is not link:
            raise Refused(f"its name {name} is that of the executor at {other.address}; give each executor a name of its own")
        if reason := self._models.conflict(facts):
            raise Refused(reason)
        self._claims[name] = link

    def unclaim(self, link: ExecutorLink) -> None:
        self._claims = {name: holder for name, holder in self._claims.items() if holder is not link}

    async def next_epoch(self, link: ExecutorLink, facts: ExecutorFacts) -> int:
        name = facts.description.name
        claim = partial(self._ledger.claim_executor, inherited=link.inherited, at_least=facts.epoch + 1)
        try:
            return await asyncio.to_thread(claim, self._lease, name, link.address)
        except ExecutorTaken:
            if link.address in self._awaited or name in self._loop.drives:
                self._models.forget(name)
                self._given_away(facts.description)
            self._met(link)
            raise

    def knows_tokenizer(self, digest: str) -> bool:
        return self._models.knows_tokenizer(digest)

    async def learn_tokenizer(self, digest: str, files: dict[str, bytes]) -> None:
        await self._models.learn_tokenizer(digest, files)

    def joined(self, link: ExecutorLink, facts: ExecutorFacts, epoch: int, standing: Standing) -> None:
        depth = min(PIPELINE_DEPTH, facts.description.pipeline_depth)
        pacer = Pacer(depth, time.monotonic(), self._repeats)
        drive = Drive(link, facts, epoch, pacer, standing.blocks, joined_s=self._loop.clock(), stored=standing.stored)
        self._drives[link] = drive
        self._log.info(
            "executor joined",
            executor=drive.name,
            address=link.address,
            epoch=epoch,
            model=facts.description.model,
            device=facts.device,
            version=facts.version,
            kv_blocks=standing.blocks.total,
            cached_blocks=standing.blocks.cached,
        )
        self._models.joined(facts)
        self._loop.joined(drive)
        self._met(link)
        self._changed()

    def answered(self, link: ExecutorLink, result: Result) -> None:
        self._loop.answered(self._drives[link], result)

    def lost(self, link: ExecutorLink, reason: str, lives: bool) -> None:
        drive = self._drives.pop(link)
        log = self._log.info if link.leaving else self._log.warning
        log("executor lost", executor=drive.name, address=link.address, epoch=drive.epoch, reason=reason)
        self._models.lost(drive.name)
        self._loop.lost(drive, reason, lives)
        self._changed()

    async def fenced(self, name: str, reason: str) -> bool:
        """One of the same database has it by right. Where the ledger says it is ours, one of another database has taken it."""
        try:
            is_ours = await asyncio.to_thread(self._ledger.has_executor, self._lease, name)
        except LedgerUnavailable:
            # The next attempt to claim it will tell.
            return False
        if is_ours:
            self._loop.fail(Fenced(f"a scheduler of another database drives executor {name}: {reason}"))
        return is_ours

    def _link_ended(self, link: ExecutorLink, task: asyncio.Task[None]) -> None:
        self.links.remove(link)
        self._tasks.remove(task)
        self._met(link)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.fail(error)
