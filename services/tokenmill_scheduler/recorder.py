"""What has happened, on its way out: shown to the live requests at once, to the ledger next, and to readers once it is durable.

Commit, then tell: `LiveRequests.happened` is what the loop goes by, `LiveRequests.committed` what a client may see.
Must not know: why it happened, plans, SQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import structlog

from tokenmill_scheduler.core.effects import Transitioned
from tokenmill_scheduler.core.request import TERMINAL, State
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.records import Outcome, Record, Submission
from tokenmill_scheduler.live import LiveRequests
from tokenmill_scheduler.metrics import Metrics
from tokenmill_scheduler.tally import Tally


class RecordWriter(Protocol):
    """The way to the ledger: `ledger.writer.LedgerWriter` in production. Used on the event loop's thread."""

    @property
    def saturated(self) -> bool:
        """The backlog is at its bound: nothing that makes more records should be started."""

    @property
    def outage(self) -> LedgerUnavailable | None:
        """Why nothing can be written for now."""

    @property
    def backlog(self) -> int: ...

    def append(self, records: Sequence[Record], on_durable: Callable[[list[Outcome]], None] | None = None) -> None:
        """In order; `on_durable` is called once they are durable."""

    async def submit(self, submission: Submission, *beside: Record) -> Outcome:
        """Returns once it is durable, and `beside` with it. Raises LedgerUnavailable, with nothing written."""


class Recorder:
    """`committed` is called after each commit; what goes wrong in telling of one is given to `fail`.

    `last_commit` is done once all that was recorded is durable; None before the first record.
    """

    def __init__(
        self,
        live: LiveRequests,
        writer: RecordWriter,
        metrics: Metrics,
        count: Tally,
        clock: Callable[[], float],
        committed: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.last_commit: asyncio.Future[None] | None = None
        self._live = live
        self._writer = writer
        self._metrics = metrics
        self._count = count
        self._clock = clock
        self._committed = committed
        self._fail = fail
        # Bound here once: an unbound one is bound anew at each call, even of a level that is off.
        self._log = structlog.get_logger(__name__).bind()

    def record(self, records: Sequence[Record]) -> None:
        self._live.happened(records)
        if moves := [record for record in records if isinstance(record, Transitioned)]:
            self._count(self._metrics.moved, moves)
            self._log_moves(moves)
        self.last_commit = commit = asyncio.get_running_loop().create_future()
        self._writer.append(records, partial(self._tell, records, self._clock(), commit))

    def _tell(self, records: Sequence[Record], handed_over_s: float, commit: asyncio.Future[None], outcomes: list[Outcome]) -> None:
        try:
            self._live.committed(records)
            self._count(self._metrics.committed, records, handed_over_s, self._clock())
        except Exception as error:
            self._fail(error)
            raise
        commit.set_result(None)
        self._committed()

    def _log_moves(self, moves: Sequence[Transitioned]) -> None:
        for record in moves:
            if record.after in TERMINAL or record.after is State.PREEMPTED:
                log = self._log.warning if record.after is State.FAILED else self._log.info
                log(
                    f"request {record.after}",
                    request_id=record.request_id,
                    reason=record.error or record.reason or record.finish_reason,
                    executor=record.executor,
                )
