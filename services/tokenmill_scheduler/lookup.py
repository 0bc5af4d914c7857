"""Where a request is: live here, or in the ledger, where it has ended or is another scheduler's. Must not know: protobuf, SQL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tokenmill_scheduler.arrivals import Arrivals
from tokenmill_scheduler.core.choices import choice_ids
from tokenmill_scheduler.core.request import TERMINAL
from tokenmill_scheduler.desk.errors import Unavailable, UnknownRequest
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import StoredRequest
from tokenmill_scheduler.live import LiveRequests, RequestView
from tokenmill_scheduler.reads import RETRY_DELAY_S, read_ledger

# How often a request that changes hands is looked for, and what a takeover takes beyond the lease time.
SETTLE_POLL_S = 0.1
TAKEOVER_S = 2.0

T = TypeVar("T")


class ChangingHands(Exception):
    """A request is between two schedulers: neither changes or reads it until it has come to the other."""


class Lookup:
    """`lease` is the number of this scheduler's: which requests are its own. `check_open` raises Unavailable once it stops."""

    def __init__(
        self, live: LiveRequests, ledger: Ledger, arrivals: Arrivals, lease_time_s: float, check_open: Callable[[], None]
    ) -> None:
        self.lease: int | None = None
        self._live = live
        self._ledger = ledger
        self._arrivals = arrivals
        self._settle_limit_s = lease_time_s + TAKEOVER_S
        self._check_open = check_open

    async def stored(self, request_id: str) -> StoredRequest:
        """As the ledger has it. Raises UnknownRequest, Unavailable."""
        stored = await read_ledger(self._ledger.find, request_id)
        if stored is None:
            raise UnknownRequest(f"there is no request {request_id}")
        return stored

    async def find(self, request_id: str) -> RequestView | StoredRequest:
        """The live request, or else one that has ended or is another scheduler's. Raises ChangingHands, and as `stored`."""
        await self._arrivals.over(request_id)
        # It can end between the look at the live requests and that at the ledger, or arrive: then the second look finds it.
        for _ in range(2):
            if (live := self._live.get(request_id)) is not None:
                return live
            stored = await self.stored(request_id)
            if stored.state in TERMINAL or stored.lease != self.lease:
                return stored
        raise ChangingHands

    async def choices(self, request_id: str) -> list[RequestView | StoredRequest]:
        """All of the request, or the one that is named. Raises as `find`."""
        first = await self.find(request_id)
        return [first, *[await self.find(other) for other in choice_ids(first.request)[1:]]]

    async def once_settled(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What `attempt` gives, begun again as long as its request changes hands.

        Raises Unavailable when that takes longer than to take over from a scheduler that has fallen.
        """
        try:
            async with asyncio.timeout(self._settle_limit_s):
                while True:
                    try:
                        return await attempt()
                    except ChangingHands:
                        self._check_open()
                        await asyncio.sleep(SETTLE_POLL_S)
        except TimeoutError:
            raise Unavailable("the request changes hands, or the scheduler that has it does not answer", RETRY_DELAY_S) from None
