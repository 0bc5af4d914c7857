"""This scheduler's lease: taking it, keeping it, and taking over from schedulers that have fallen.

The keeper is a thread of its own, so that neither a busy event loop nor busy readers of the ledger cost the lease; but it renews
only while the loop turns, so that a scheduler that hangs falls and another goes on. Safety does not hang on any of these times: the
writes of a fallen scheduler find no lease. Must not know: SQL, requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from tokenmill_scheduler.ledger.errors import LeaseLost, LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Estate, Lease

# A lease is renewed when a third of it has passed, so that two renewals may fail.
RENEWALS = 3
# How often others are looked at: a new one is soon known, a fallen one soon taken over.
LOOKS = 6
LONGEST_LOOK_S = 0.5


def take_lease(ledger: Ledger, scheduler: str, lease_s: float, *, alone: bool, told: Sequence[str] = ()) -> tuple[Lease, Estate]:
    """A new lease, with what earlier processes of this scheduler have left, or any that stopped; if `alone`, all that there is.

    `told`: addresses of the executors that this one is to drive.
    """
    lease = ledger.take_lease(scheduler, lease_s)
    fallen = [
        status.lease.number
        for status in ledger.leases()
        if status.lease != lease and (alone or status.given_up or status.lease.scheduler == scheduler)
    ]
    return lease, ledger.take_over(lease, fallen, told)


class LeaseKeeper:
    """`alive` says whether this scheduler is fit to go on. `peers` are the others' leases as last seen."""

    def __init__(
        self, ledger: Ledger, lease: Lease, lease_s: float, alive: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.peers: tuple[Lease, ...] = ()
        self.interval_s = min(lease_s / LOOKS, LONGEST_LOOK_S)
        self._ledger = ledger
        self._lease = lease
        self._lease_s = lease_s
        self._alive = alive
        self._clock = clock
        self._renewed_s = self._looked_s = self._watching_since_s = clock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = structlog.get_logger(__name__)

    def start(self, on_estate: Callable[[Estate], None], on_failure: Callable[[Exception], None]) -> None:
        """To be called on the event loop that the callbacks shall run on; `on_failure` is told once, of a LeaseLost or a bug."""
        loop = asyncio.get_running_loop()

        def tell(callback: Callable[..., object], news: object) -> None:
            # A closed loop has no one left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(callback, news)

        def run() -> None:
            try:
                while not self._stopping.wait(self.interval_s):
                    if (estate := self.step()) is not None:
                        tell(on_estate, estate)
            except Exception as error:
                tell(on_failure, error)

        self._thread = threading.Thread(target=run, name="lease-keeper", daemon=True)
        self._thread.start()

    async def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)

    def step(self) -> Estate | None:
        """One look at the leases; what was taken over, if anything was. Raises LeaseLost.

        A lease is taken over when it was given up, or has run out under our eyes: while the database is away nobody can renew, and
        whoever finds it again first must not take over from those who are about to.
        """
        try:
            self._renew()
            fallen = self._look()
            if not fallen or not self._alive():
                return None
            return self._take_over(fallen)
        except LedgerUnavailable as error:
            self._log.debug("the leases cannot be seen to", reason=str(error))
            return None

    def _take_over(self, fallen: list[Lease]) -> Estate:
        estate = self._ledger.take_over(self._lease, [lease.number for lease in fallen])
        self._log.warning(
            "schedulers have fallen",
            schedulers=[lease.scheduler for lease in fallen],
            requests_taken_over=len(estate.requests),
            executors_taken_over=[executor for executor, _ in estate.executors],
        )
        return estate

    def _renew(self) -> None:
        now_s = self._clock()
        if self._alive() and now_s - self._renewed_s >= self._lease_s / RENEWALS:
            self._ledger.renew_lease(self._lease, self._lease_s)
            self._renewed_s = now_s

    def _look(self) -> list[Lease]:
        """The leases to be taken over."""
        statuses = self._ledger.leases()
        now_s = self._clock()
        if now_s - self._looked_s > self._lease_s / 2:
            self._watching_since_s = now_s
        self._looked_s = now_s
        if all(status.lease != self._lease for status in statuses):
            raise LeaseLost(f"the lease of scheduler {self._lease.scheduler} no longer holds: another scheduler has taken over")
        others = [status for status in statuses if status.lease != self._lease]
        self.peers = tuple(status.lease for status in others)
        has_watched = now_s - self._watching_since_s >= self._lease_s
        return [status.lease for status in others if status.given_up or (status.expired and has_watched)]
