"""Submissions on their way to disk and into the loop: one write an id, within the bounds of the queue and of tenants.

Must not know: protobuf, SQL, streams, what becomes of a request that has been accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill_scheduler.core.backlog import most_tokens
from tokenmill_scheduler.core.gate import Arriving
from tokenmill_scheduler.core.request import Request
from tokenmill_scheduler.desk.errors import Refused, Unavailable
from tokenmill_scheduler.gate import Gate
from tokenmill_scheduler.ledger.errors import LeaseLost, LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Action, Outcome, Submission
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.reads import RETRY_DELAY_S, read_ledger
from tokenmill_scheduler.recorder import RecordWriter

# A submission that takes longer looks whether the database is away.
OUTAGE_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Arrival:
    """A submission on its way to disk."""

    request: Request
    payload_digest: bytes
    outcome: asyncio.Task[Outcome]


class Arrivals:
    def __init__(
        self,
        loop: Loop,
        ledger: Ledger,
        writer: RecordWriter,
        gate: Gate,
    ) -> None:
        self._loop = loop
        self._ledger = ledger
        self._writer = writer
        self._gate = gate
        self._arriving: dict[str, Arrival] = {}

    async def take(self, request: Request, payload_digest: bytes) -> Outcome:
        """One write, and one look at most, however many submit under one id at a time.

        Returns once it is durable and the loop has it. Raises Refused, Unavailable.
        """
        while (earlier := self._arriving.get(request.request_id)) is not None:
            outcome = await self._outcome(earlier)
            if earlier.payload_digest == payload_digest:
                return Outcome.CONFLICT if outcome is Outcome.CONFLICT else Outcome.JOINED
            if outcome is not Outcome.CONFLICT:
                return Outcome.CONFLICT
            # The earlier one was not what the ledger holds under this id; this one may be.
            stored = await read_ledger(self._ledger.payload_digest, request.request_id)
            if stored is not None:
                return Outcome.JOINED if stored == payload_digest else Outcome.CONFLICT
        try:
            arrival = self.begin(request, payload_digest)
        except Refused:
            # One that is there already, though it has ended, needs no room.
            stored = await read_ledger(self._ledger.payload_digest, request.request_id)
            if stored is None:
                raise
            return Outcome.JOINED if stored == payload_digest else Outcome.CONFLICT
        return await self._outcome(arrival)

    async def _outcome(self, arrival: Arrival) -> Outcome:
        """Raises Unavailable when the database goes away meanwhile: the submission goes on, and may be asked for by its id."""
        while not arrival.outcome.done():
            await asyncio.wait([arrival.outcome], timeout=OUTAGE_LOOK_S)
            if self._writer.outage is not None and not arrival.outcome.done():
                raise Unavailable("the database cannot be written for now; submit again under the same id", RETRY_DELAY_S)
        return arrival.outcome.result()

    def begin(self, request: Request, payload_digest: bytes, *actions: Action) -> Arrival:
        """Puts it on its way, `actions` beside it. Raises Refused."""
        if self._loop.live.get(request.request_id) is None:
            self._gate.check(request, self._all_arriving())
        submission = Submission(request, payload_digest)
        # A task of its own: a request that is durable reaches the core whatever has become of its client's call.
        arrival = Arrival(request, payload_digest, asyncio.create_task(self._write(submission, actions)))
        # Who waits for it may be gone when it fails.
        arrival.outcome.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._arriving[request.request_id] = arrival
        for choice in submission.requests:
            self._loop.live.tenants.came(choice)
        return arrival

    async def _write(self, submission: Submission, actions: Sequence[Action]) -> Outcome:
        try:
            outcome = await self._writer.submit(submission, *actions)
            if outcome is Outcome.WRITTEN:
                self._loop.accept(*submission.requests)
        except LedgerUnavailable as error:
            raise Unavailable("the database cannot be written for now", RETRY_DELAY_S) from error
        except LeaseLost as error:
            raise Unavailable(str(error), RETRY_DELAY_S) from error
        finally:
            # Once accepted it is counted as a live one.
            for choice in submission.requests:
                self._loop.live.tenants.left(choice)
            del self._arriving[submission.request.request_id]
        return outcome

    def _all_arriving(self) -> Arriving:
        """Each choice counts as a request."""
        requests = [arrival.request for arrival in self._arriving.values()]
        return Arriving(sum(r.best_of for r in requests), sum(r.best_of * most_tokens(r) for r in requests))

    async def over(self, request_id: str) -> None:
        """Returns once no submission under this id is on its way."""
        if arrival := self._arriving.get(request_id):
            await asyncio.wait([arrival.outcome])
