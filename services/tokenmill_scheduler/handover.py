"""Requests that go with an executor to the scheduler that drives it now, since no other executor here can run them.

As when a fallen scheduler that was taken over from is back: it gets its executors back, and what can run on them alone must not be
left behind. Must not know: SQL, protobuf, how executors are driven.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from tokenmill_scheduler.core.request import TERMINAL
from tokenmill_scheduler.desk import Unavailable
from tokenmill_scheduler.ledger.port import Handover, Lease, Ledger, Outcome, StoredOutput, StoredRequest
from tokenmill_scheduler.loop import Loop, RecordWriter
from tokenmill_scheduler.reads import RETRY_DELAY_S, read_ledger
from tokenmill_scheduler.recovery import take_up
from tokenmill_scheduler.streams import Feed

log = structlog.get_logger(__name__)


class Handovers:
    """`hand_over_feed` gives the feed that readers here have followed a request by."""

    def __init__(self, loop: Loop, ledger: Ledger, writer: RecordWriter, hand_over_feed: Callable[[str], Feed | None]) -> None:
        self._loop = loop
        self._ledger = ledger
        self._writer = writer
        self._hand_over_feed = hand_over_feed
        self._lease: int | None = None
        self._taking_back: set[asyncio.Task[None]] = set()

    def open(self, lease: Lease) -> None:
        self._lease = lease.number

    def give(self, executor: str) -> None:
        """Another scheduler drives this executor. What only it can run is that one's, once that is durable."""
        if request_ids := self._loop.executor_gone(executor):
            self._writer.append([Handover(executor, request_ids)], partial(self._given, executor, request_ids))

    def _given(self, executor: str, request_ids: tuple[str, ...], outcomes: list[Outcome]) -> None:
        self._loop.forget(request_ids, Unavailable("another scheduler has this request now; attach again", RETRY_DELAY_S))
        if outcomes == [Outcome.WRITTEN]:
            log.info("requests handed over with their executor", executor=executor, requests=len(request_ids))
            return
        # That scheduler has fallen meanwhile.
        task = asyncio.create_task(self._take_back(request_ids))
        self._taking_back.add(task)
        task.add_done_callback(self._taking_back.discard)

    async def _take_back(self, request_ids: Sequence[str]) -> None:
        while True:
            try:
                return await self.take(request_ids)
            except Unavailable:
                await asyncio.sleep(RETRY_DELAY_S)
            except Exception as error:
                self._loop.fail(error)
                raise

    async def take(self, request_ids: Sequence[str]) -> None:
        """Goes on with requests that are this scheduler's by the ledger, if it does not yet. Raises Unavailable."""
        found: list[tuple[StoredRequest, StoredOutput]] = []
        for request_id in request_ids:
            stored = await read_ledger(self._ledger.find, request_id)
            if stored is not None and stored.state not in TERMINAL and stored.lease == self._lease:
                found.append((stored, await read_ledger(self._ledger.output, request_id)))
        new = [pair for pair in found if not self._loop.live.runs(pair[0].request.request_id)]
        take_up(self._loop, sorted(new, key=lambda pair: pair[0].request.arrival_s), self._hand_over_feed)
