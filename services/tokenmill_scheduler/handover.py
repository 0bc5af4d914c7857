"""Requests that nobody here can run go to a scheduler with an executor that can, and those that others hand over are taken up.

Each scheduler tells the others through the ledger which executors it has connected and what they can hold, and looks for theirs now
and then. What waits here for an executor that is lost waits for it so long (`patience_s`), and goes elsewhere if it can then; what
an executor takes along that is another scheduler's from here on goes at once. A request is always one scheduler's: the one that has
it gives it away, guarded in the ledger, so no two ever run it. Must not know: SQL, protobuf, how executors are driven.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import structlog

from tokenmill_scheduler.core.events import ExecutorGone, ExecutorsKnown, KnownExecutor
from tokenmill_scheduler.core.plans import ExecutorDescription
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Handover, Lease, Outcome
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.overview import connected_executors
from tokenmill_scheduler.reads import RETRY_DELAY_S, read_ledger
from tokenmill_scheduler.recorder import RecordWriter
from tokenmill_scheduler.recovery import take_up
from tokenmill_scheduler.streams import Feed

LOOK_S = 0.5
PATIENCE_S = 10.0
# Readers may come again at once: it is another's when they are told.
ATTACH_DELAY_S = 0.1

log = structlog.get_logger(__name__)


class Handovers:
    """`hand_over_feed` gives the feed that readers here have followed a request by."""

    def __init__(
        self,
        loop: Loop,
        ledger: Ledger,
        writer: RecordWriter,
        hand_over_feed: Callable[[str], Feed | None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._loop = loop
        self._ledger = ledger
        self._writer = writer
        self._hand_over_feed = hand_over_feed
        self._patience_s = patience_s
        self._lease: Lease
        # By executor name and epoch: what the others were told last.
        self._told: dict[tuple[str, int], ExecutorDescription] = {}
        self._known: tuple[KnownExecutor, ...] = ()
        # Counts executors that have gone to other schedulers: a look that was begun before does not know of it.
        self._given = 0
        # So that they are not lost to the garbage collector.
        self._taking_back: set[asyncio.Task[None]] = set()
        self._taking = asyncio.Lock()

    def open(self, lease: Lease) -> None:
        self._lease = lease

    # ---- giving ----------------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.look()
            except LedgerUnavailable as error:
                log.debug("executors of other schedulers cannot be looked for", reason=str(error))
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Tells of the executors here, learns of those elsewhere, and gives away what they alone can run."""
        given, connected = self._given, connected_executors(self._loop)
        if connected != self._told:
            await asyncio.to_thread(self._ledger.tell_executors, self._lease, list(connected.values()))
            self._told = connected
        known = await asyncio.to_thread(self._ledger.known_executors, self._lease)
        if given != self._given:
            return
        if known != self._known:
            self._known = known
            self._loop.handle(ExecutorsKnown(known))
        self._give_strays()

    def executor_gone(self, executor: ExecutorDescription) -> None:
        """Another scheduler drives it. What only it can run is that one's, once that is durable."""
        self._given += 1
        self._known = ()
        self._loop.drives.pop(executor.name, None)
        self._loop.handle(ExecutorGone(executor))
        self._give_strays()

    def _give_strays(self) -> None:
        for executor, request_ids in self._loop.scheduler.strays(self._patience_s).items():
            losses = tuple([self._loop.scheduler.losses(request_id) for request_id in request_ids])
            self._loop.hand_over(request_ids)
            handover = Handover(executor, request_ids, losses)
            self._writer.append([handover], partial(self._handed_over, handover))

    def _handed_over(self, handover: Handover, outcomes: list[Outcome]) -> None:
        request_ids = handover.request_ids
        self._loop.forget(request_ids, Unavailable("another scheduler has this request now; attach again", ATTACH_DELAY_S))
        if outcomes == [Outcome.WRITTEN]:
            log.info("requests handed over", executor=handover.executor, requests=len(request_ids))
        else:
            # That scheduler has fallen meanwhile.
            task = asyncio.create_task(self._take_back(dict(zip(request_ids, handover.losses, strict=True))))
            self._taking_back.add(task)
            task.add_done_callback(self._taking_back.discard)

    # ---- taking ----------------------------------------------------------------------------------------------------------------

    async def _take_back(self, losses: Mapping[str, int]) -> None:
        while not self._loop.failure.done():
            try:
                await self.take(losses)
                break
            except Unavailable:
                await asyncio.sleep(RETRY_DELAY_S)
            except Exception as error:
                self._loop.fail(error)
                raise

    async def take(self, losses: Mapping[str, int]) -> None:
        """Goes on with requests that are this scheduler's by the ledger, if it does not yet. Raises Unavailable.

        `losses`: by request, how many executors it is suspected to have cost.
        """
        # What runs here is not read, nor one request twice at once: it may end before what was read of it is looked at.
        async with self._taking:
            new = [request_id for request_id in losses if not self._loop.live.has(request_id)]
            if new:
                take_up(self._loop, await read_ledger(self._ledger.held, self._lease, new), self._hand_over_feed, losses)
