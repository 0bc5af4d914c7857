"""Submissions on their way to disk and into the loop: one write an id, within the bounds of the queue and of tenants.

Must not know: protobuf, SQL, streams, what becomes of a request that has been accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill_scheduler.core.request import Request
from tokenmill_scheduler.desk import QueueFull, TenantLimit, Unavailable
from tokenmill_scheduler.ledger.port import Action, LeaseLost, Ledger, LedgerUnavailable, Outcome, Submission
from tokenmill_scheduler.loop import Loop, RecordWriter
from tokenmill_scheduler.reads import RETRY_DELAY_S, read_ledger
from tokenmill_scheduler.tenants import TenantLimits, num_tokens

# A submission that takes longer looks whether the database is away.
OUTAGE_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Arrival:
    """A submission on its way to disk, of so many choices."""

    payload_digest: bytes
    num_choices: int
    outcome: asyncio.Task[Outcome]


class Arrivals:
    def __init__(
        self,
        loop: Loop,
        ledger: Ledger,
        writer: RecordWriter,
        max_queue_len: int,
        tenant_limits: Callable[[str], TenantLimits],
    ) -> None:
        """`tenant_limits` gives those of a tenant as they are now."""
        self._loop = loop
        self._ledger = ledger
        self._writer = writer
        self._max_queue_len = max_queue_len
        self._tenant_limits = tenant_limits
        self._arriving: dict[str, Arrival] = {}

    async def take(self, request: Request, payload_digest: bytes) -> Outcome:
        """One write, and one look at most, however many submit under one id at a time.

        Returns once it is durable and the loop has it. Raises QueueFull, TenantLimit, Unavailable.
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
        return await self._outcome(self.begin(request, payload_digest))

    async def _outcome(self, arrival: Arrival) -> Outcome:
        """Raises Unavailable when the database goes away meanwhile: the submission goes on, and may be asked for by its id."""
        while not arrival.outcome.done():
            await asyncio.wait([arrival.outcome], timeout=OUTAGE_LOOK_S)
            if self._writer.outage is not None and not arrival.outcome.done():
                raise Unavailable("the database cannot be written for now; submit again under the same id", RETRY_DELAY_S)
        return arrival.outcome.result()

    def begin(self, request: Request, payload_digest: bytes, *actions: Action) -> Arrival:
        """Puts it on its way, `actions` beside it. Raises QueueFull, TenantLimit."""
        if self._loop.live.get(request.request_id) is None:
            self._check_queue(request)
            self._check_tenant(request)
        submission = Submission(request, payload_digest)
        # A task of its own: a request that is durable reaches the core whatever has become of its client's call.
        arrival = Arrival(payload_digest, request.best_of, asyncio.create_task(self._write(submission, actions)))
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

    def _check_queue(self, request: Request) -> None:
        """Each choice counts as a request."""
        queued = self._loop.num_waiting + sum(arrival.num_choices for arrival in self._arriving.values())
        if queued + request.best_of > self._max_queue_len:
            words = f"{queued} requests are queued, --max-queue-len allows {self._max_queue_len}"
            raise QueueFull(words if request.best_of == 1 else f"{words}, and this one counts as {request.best_of}", RETRY_DELAY_S)

    def _check_tenant(self, request: Request) -> None:
        tenant, limits, usage = request.tenant, self._tenant_limits(request.tenant), self._loop.live.tenants.of(request.tenant)
        if limits.max_requests is not None and usage.requests + request.best_of > limits.max_requests:
            words = f"tenant {tenant} has {usage.requests} requests and may have {limits.max_requests}"
            fits = request.best_of <= limits.max_requests
            raise TenantLimit(f"{words}; this one counts as {request.best_of}", RETRY_DELAY_S if fits else None)
        most, tokens = limits.max_queued_tokens, request.best_of * num_tokens(request)
        if most is not None and tokens > most:
            words = f"the request may come to {tokens} tokens, more than the {most} that tenant {tenant} may have queued"
            raise TenantLimit(f"{words}: ask for a lower max_tokens", retry_delay_s=None)
        if most is not None and usage.queued_tokens + tokens > most:
            words = f"tenant {tenant} has {usage.queued_tokens} tokens queued and may have {most}"
            raise TenantLimit(f"{words}; the request may come to {tokens}", RETRY_DELAY_S)

    async def over(self, request_id: str) -> None:
        """Returns once no submission under this id is on its way."""
        if arrival := self._arriving.get(request_id):
            await asyncio.wait([arrival.outcome])
