"""Commit, then tell: one thread that writes what the event loop hands it, all that gathered since the last commit at once.

A slow disk thus delays streams, never the loop. Records are written in the order they were handed over. While the ledger is
unavailable they wait and the same write is repeated; any other error stops the writer for good (a guard that failed means that
this process no longer knows the truth), and the owner is told. Must not know: SQL, what the records mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Lease, Outcome, Record, Submission

FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0

OnDurable = Callable[[list[Outcome]], None]
OnLost = Callable[[Exception], None]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Records handed over together: one transaction has all of them."""

    records: Sequence[Record]
    on_durable: OnDurable | None
    on_lost: OnLost | None
    since_s: float


class LedgerWriter:
    """Its methods belong to the event loop; they never block it. Call `start` first.

    `max_backlog`: records waiting above which `saturated` is true and submissions are refused. It does not refuse `append`, for
    results of steps under way must be kept: the loop sends no more plans while the writer is saturated, which bounds the rest.
    `max_batch`: most records one transaction takes, unless one call hands over more.
    `interval_s`: how soon after another a transaction may begin whose records may all wait, as `may_wait` says of what one call
    hands over. What may not is written at once, with all that came before it.
    `on_failure` is called on the loop, once, with what stopped the writer.
    `commits` counts transactions, `records` what they made durable.
    """

    def __init__(
        self,
        ledger: Ledger,
        on_failure: Callable[[Exception], None],
        *,
        max_backlog: int = 8192,
        max_batch: int = 1024,
        interval_s: float = 0.0,
        may_wait: Callable[[Sequence[Record]], bool] = lambda records: False,
    ) -> None:
        self._ledger = ledger
        self._on_failure = on_failure
        self._max_backlog = max_backlog
        self._max_batch = max_batch
        self._interval_s = interval_s
        self._may_wait = may_wait
        self._guard = threading.Lock()
        # Guarded by `_guard`: what waits, whether some of it may not, what is being written, the number of records in both.
        self._waiting: deque[_Entry] = deque()
        self._urgent = False
        self._writing: list[_Entry] = []
        self._backlog = 0
        self._begun_s = -interval_s
        self.commits = 0
        self.records = 0
        self._closing = False
        self._given_up = threading.Event()
        self._failure: Exception | None = None
        self._lease: Lease | None = None
        self._outage: LedgerUnavailable | None = None
        # The thread sleeps in taking it until somebody gives it back. (A condition does that, too, with a page of Python.)
        self._bell = threading.Lock()
        self._bell.acquire()
        self._rings_soon = False
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)

    def start(self, lease: Lease | None = None) -> None:
        """To be called on the event loop that callbacks shall run on. Every write is fenced by `lease`."""
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._thread.start()

    def append(self, records: Sequence[Record], on_durable: OnDurable | None = None) -> None:
        """Hands records over; `on_durable` gets an outcome for each, on the loop, after their commit.

        Raises what stopped the writer, if it has stopped.
        """
        self._put(records, on_durable, None)

    async def submit(self, submission: Submission, *beside: Record) -> Outcome:
        """Returns once it is durable, and `beside` with it. If the caller stops waiting it is written all the same.

        Raises LedgerUnavailable at once while the ledger is away or the backlog is full, or what stopped the writer.
        """
        if self._outage is not None:
            raise LedgerUnavailable(str(self._outage))
        if self.saturated:
            raise LedgerUnavailable(f"{self._backlog} records wait to be written")
        answer: asyncio.Future[Outcome] = self._loop.create_future()

        def on_durable(outcomes: list[Outcome]) -> None:
            if not answer.done():
                answer.set_result(outcomes[0])

        def on_lost(error: Exception) -> None:
            if not answer.done():
                answer.set_exception(error)

        self._put([submission, *beside], on_durable, on_lost)
        return await answer

    @property
    def backlog(self) -> int:
        """Records not yet durable."""
        return self._backlog

    @property
    def saturated(self) -> bool:
        """The loop should send no more plans until this is false again."""
        return self._backlog >= self._max_backlog

    @property
    def outage(self) -> LedgerUnavailable | None:
        """Why the write under way has to be repeated; None when the last one went well."""
        return self._outage

    def oldest_age_s(self) -> float:
        """For how long the oldest record has waited; 0 when none does."""
        with self._guard:
            oldest = self._writing[0] if self._writing else self._waiting[0] if self._waiting else None
        return time.monotonic() - oldest.since_s if oldest else 0.0

    async def close(self, timeout_s: float) -> bool:
        """Writes what waits, then stops. False if that took longer (or the writer had failed): what still waited is lost."""
        self._closing = True
        self._ring()
        try:
            async with asyncio.timeout(timeout_s):
                await self._stopped.wait()
        except TimeoutError:
            self._given_up.set()
            self._lose(LedgerUnavailable("the scheduler stopped before the ledger was available"))
            return False
        return self._failure is None

    def _put(self, records: Sequence[Record], on_durable: OnDurable | None, on_lost: OnLost | None) -> None:
        entry = _Entry(records, on_durable, on_lost, time.monotonic())
        urgent = not self._may_wait(records)
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise LedgerUnavailable("the scheduler is stopping")
        with self._guard:
            self._waiting.append(entry)
            self._urgent = self._urgent or urgent
            self._backlog += len(records)
            # The thread wakes by itself when the interval is over, and needs no waking for what may wait until then.
            wakes = urgent or self._interval_left_s() <= 0
        if wakes and not self._rings_soon:
            # Not in the middle of this turn of the event loop: the two would take the interpreter from each other.
            self._rings_soon = True
            self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._rings_soon = False
        if self._bell.locked():
            self._bell.release()

    # ---- on the loop, called by the thread ----

    def _deliver(self, entries: Sequence[_Entry], outcomes: list[Outcome]) -> None:
        """One wake-up of the loop for each commit, however many callbacks."""
        start = 0
        for entry in entries:
            stop = start + len(entry.records)
            if entry.on_durable is not None:
                try:
                    entry.on_durable(outcomes[start:stop])
                except Exception as error:
                    # One callback's bug must not keep the others from being told.
                    self._loop.call_exception_handler({"message": "an on_durable callback failed", "exception": error})
            start = stop

    def _fail(self, error: Exception) -> None:
        self._lose(error)
        self._on_failure(error)

    def _lose(self, error: Exception) -> None:
        with self._guard:
            lost = [*self._writing, *self._waiting]
            self._waiting.clear()
        for entry in lost:
            if entry.on_lost is not None:
                entry.on_lost(error)

    # ---- on the thread ----

    def _run(self) -> None:
        try:
            while entries := self._take():
                outcomes = self._write([record for entry in entries for record in entry.records])
                if outcomes is None:
                    return
                with self._guard:
                    self._writing = []
                    self._backlog -= len(outcomes)
                self.commits += 1
                self.records += len(outcomes)
                self._call(self._deliver, entries, outcomes)
        except Exception as error:
            self._failure = error
            self._call(self._fail, error)
        finally:
            self._call(self._stopped.set)

    def _take(self) -> list[_Entry]:
        """Waits for entries and takes as many as fit one transaction; none when closing and all is written."""
        while (wait_s := self._wait_s()) is not None:
            self._bell.acquire(timeout=wait_s)
        self._begun_s = time.monotonic()
        with self._guard:
            size = 0
            while self._waiting and (not self._writing or size + len(self._waiting[0].records) <= self._max_batch):
                size += len(self._waiting[0].records)
                self._writing.append(self._waiting.popleft())
            self._urgent = self._urgent and bool(self._waiting)
            return self._writing

    def _wait_s(self) -> float | None:
        """None when there is something to do. Else to the end of the interval under way, then until something comes (-1)."""
        with self._guard:
            left_s = self._interval_left_s()
            if self._urgent or self._closing or (self._waiting and left_s <= 0):
                return None
        return left_s if left_s > 0 else -1

    def _interval_left_s(self) -> float:
        """Asked with the guard held: whoever puts something in later sees a later time."""
        return self._begun_s + self._interval_s - time.monotonic()

    def _write(self, records: list[Record]) -> list[Outcome] | None:
        """Repeats the write, at growing intervals, until it is done or the owner gives up (None)."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                outcomes = self._ledger.write(records, self._lease)
            except LedgerUnavailable as error:
                self._outage = error
            else:
                self._outage = None
                return outcomes
            if self._given_up.wait(retry_s):
                return None
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        # A closed loop has no one left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)
