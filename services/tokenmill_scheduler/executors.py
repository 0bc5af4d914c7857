"""The executors this scheduler was told of: one link each, and what their joining and leaving means for the loop and the models.

Must not know: requests, protobuf.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from tokenmill_scheduler.core.records import Blocks, Result
from tokenmill_scheduler.drive import Drive
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.link import ExecutorLink, Refused
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.models import Models
from tokenmill_scheduler.pacing import Pacer
from tokenmill_scheduler.session import Fenced, SessionLimits
from tokenmill_scheduler.settings import ClientTls
from tokenmill_scheduler.wire import ExecutorFacts

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
    ) -> None:
        self.links = [ExecutorLink(address, self, limits, max_message_bytes, tls) for address in addresses]
        self._loop = loop
        self._models = models
        self._ledger = ledger
        self._changed = changed
        self._claims: dict[str, ExecutorLink] = {}
        self._drives: dict[ExecutorLink, Drive] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._log = structlog.get_logger(__name__)

    def start(self) -> None:
        for link in self.links:
            task = asyncio.create_task(link.run())
            task.add_done_callback(self._link_ended)
            self._tasks.append(task)

    async def leave(self, timeout_s: float) -> None:
        """Says goodbye to every executor, and ends the links that take longer than this."""
        for link in self.links:
            link.leave()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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

    async def next_epoch(self, name: str, at_least: int) -> int:
        return await asyncio.to_thread(self._ledger.next_epoch, name, at_least)

    def knows_tokenizer(self, digest: str) -> bool:
        return self._models.knows_tokenizer(digest)

    async def learn_tokenizer(self, digest: str, files: dict[str, bytes]) -> None:
        await self._models.learn_tokenizer(digest, files)

    def joined(self, link: ExecutorLink, facts: ExecutorFacts, epoch: int, blocks: Blocks) -> None:
        depth = min(PIPELINE_DEPTH, facts.description.pipeline_depth)
        pacer = Pacer(depth, joined_s=asyncio.get_running_loop().time())
        drive = Drive(link, facts, epoch, pacer, blocks, joined_s=self._loop.clock())
        self._drives[link] = drive
        self._log.info(
            "executor joined",
            executor=drive.name,
            address=link.address,
            epoch=epoch,
            model=facts.description.model,
            device=facts.device,
            version=facts.version,
            kv_blocks=blocks.total,
        )
        self._models.joined(facts)
        self._loop.joined(drive)
        self._changed()

    def answered(self, link: ExecutorLink, result: Result) -> None:
        self._loop.answered(self._drives[link], result)

    def lost(self, link: ExecutorLink, reason: str) -> None:
        drive = self._drives.pop(link)
        log = self._log.info if link.leaving else self._log.warning
        log("executor lost", executor=drive.name, address=link.address, epoch=drive.epoch, reason=reason)
        self._models.lost(drive.name)
        self._loop.lost(drive, reason)
        self._changed()

    def fenced(self, link: ExecutorLink, reason: str) -> None:
        """Its requests are the other scheduler's now, so this one must not go on writing: the process ends."""
        drive = self._drives.pop(link)
        drive.connected = False
        self._models.lost(drive.name)
        self._changed()
        self._loop.fail(Fenced(f"another scheduler drives executor {drive.name}: {reason}"))

    def _link_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.fail(error)
