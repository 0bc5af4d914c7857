"""The desk: what servicers may ask, answered from the loop, which owns the live requests, and the ledger, which owns the truth.

Reads go to the ledger in a thread. What readers are told is durable first, so a read is never older than what was told.
Must not know: protobuf, SQL, the plan protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tokenmill_scheduler.arrivals import Arrivals
from tokenmill_scheduler.changes import cancellation, second_try
from tokenmill_scheduler.control import Control, Tries
from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.core.request import QUEUED, TERMINAL, Request, State
from tokenmill_scheduler.core.waiting import WaitCode
from tokenmill_scheduler.desk.errors import RequestEnded, RequestExists, RequestNotFailed, Unavailable, UnknownRequest
from tokenmill_scheduler.desk.port import Attachment
from tokenmill_scheduler.desk.records import Cancellation, ExecutorStatus, Load, RequestStatus, ServedModel, Submitted
from tokenmill_scheduler.followers import Followers
from tokenmill_scheduler.gate import Gate
from tokenmill_scheduler.handover import PATIENCE_S, Handovers
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import (
    ActionVerb,
    Command,
    Lease,
    Outcome,
    RequestPage,
    RequestQuery,
    StoredOutput,
    StoredRequest,
    StoredTransition,
    Verb,
)
from tokenmill_scheduler.lookup import Lookup
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.models import Models
from tokenmill_scheduler.overview import executor_statuses, load
from tokenmill_scheduler.readers import Readers
from tokenmill_scheduler.reads import RETRY_DELAY_S, read_ledger
from tokenmill_scheduler.recorder import RecordWriter
from tokenmill_scheduler.relay import Relay
from tokenmill_scheduler.tenants import TenantLimits

ANNOUNCE_S = 10.0
# The lease of a command that is not addressed yet.
_NOBODY = 0


class LoopDesk:
    """Implements `desk.port.Desk`."""

    def __init__(
        self,
        queue_limits: QueueLimits,
        loop: Loop,
        models: Models,
        ledger: Ledger,
        writer: RecordWriter,
        tenant_limits: Callable[[str], TenantLimits] = lambda tenant: TenantLimits(),
        announce_s: float = ANNOUNCE_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`tenant_limits` gives those of a tenant as they are now. For `announce_s` see `Followers`.

        `patience_s`, the lease time: how long executors that are lost are waited for, see `Handovers`, and schedulers that may be.
        """
        self._loop = loop
        self._models = models
        self._ledger = ledger
        self._writer = writer
        self._arrivals = Arrivals(loop, ledger, writer, Gate(loop, queue_limits, tenant_limits))
        self._closed = False
        self._name = ""
        self.relay = Relay(ledger)
        self._lookup = Lookup(loop.live, ledger, self._arrivals, patience_s, self.check_open)
        self._control = Control(loop, self.relay, self._lookup, self.check_open)
        self.followers = Followers(ledger, self.relay.tell, announce_s)
        self._readers = Readers(loop, ledger, self._lookup, self.followers)
        self.handovers = Handovers(loop, ledger, writer, self.followers.hand_over, patience_s)

    def open(self, lease: Lease) -> None:
        """Requests of this lease are this scheduler's, others are changed and followed through the ledger."""
        self._lookup.lease = lease.number
        self._name = lease.scheduler
        self.handovers.open(lease)

    def close(self) -> None:
        """No submits or changes from here on; a reader's leaving cancels nothing any more."""
        self._closed = True
        self._readers.close()

    def check_open(self) -> None:
        """Raises Unavailable while nothing can be changed."""
        if self._closed:
            raise Unavailable("the scheduler is shutting down", RETRY_DELAY_S)
        if self._writer.outage is not None:
            raise Unavailable("the database cannot be written for now", RETRY_DELAY_S)

    def close_streams(self, reason: Unavailable) -> None:
        self._readers.close_streams(reason)

    def model(self, name: str) -> ServedModel:
        return self._models.find(name)

    def models(self) -> tuple[ServedModel, ...]:
        return self._models.all()

    def most_choices(self, model: str, num_prompt_tokens: int, max_tokens: int) -> int | None:
        return self._loop.scheduler.most_choices(model, num_prompt_tokens, max_tokens)

    # ---- submit and attach -----------------------------------------------------------------------------------------------------

    async def submit(self, request: Request, payload_digest: bytes) -> Submitted:
        self.check_open()
        outcome = await self._arrivals.take(request, payload_digest)
        if outcome is Outcome.CONFLICT:
            raise RequestExists(f"request {request.request_id} exists with another payload")
        return Submitted(request.request_id, joined=outcome is Outcome.JOINED)

    async def attach(self, request_id: str, next_index: int) -> Attachment:
        return (await self.attach_all({request_id: next_index}))[0]

    async def attach_all(self, next_indexes: Mapping[str, int]) -> tuple[Attachment, ...]:
        return await self._readers.attach_all(next_indexes)

    # ---- changes ---------------------------------------------------------------------------------------------------------------

    async def cancel(self, request_id: str, reason: str, actor: str = "") -> Cancellation:
        command = Command(_NOBODY, request_id, Verb.CANCEL, reason, actor=actor)
        tries = Tries()
        after = await self._lookup.once_settled(partial(self._control.change, command, tries))
        return cancellation(tries.before, after)

    async def update(
        self, request_id: str, priority: int | None, deadline_s: float | None, reason: str = "", actor: str = ""
    ) -> RequestStatus:
        command = Command(_NOBODY, request_id, Verb.UPDATE, reason, priority, deadline_s, actor)
        states = await self._lookup.once_settled(partial(self._control.change, command, Tries()))
        if all(state in TERMINAL for state in states.values()):
            raise RequestEnded(f"request {request_id} has ended: {next(iter(states.values()))}")
        return await self.status(request_id)

    async def retry(self, request_id: str, new_request_id: str, reason: str, actor: str) -> None:
        self.check_open()
        stored = await self._lookup.stored(request_id)
        if stored.state is not State.FAILED:
            raise RequestNotFailed(f"request {request_id} is {stored.state}: only a failed one can be tried again")
        digest = await read_ledger(self._ledger.payload_digest, request_id)
        if digest is None:
            raise UnknownRequest(f"there is no request {request_id} any more")
        request = second_try(stored.request, new_request_id, self._loop.clock())
        actions = self._control.actions(actor, ActionVerb.RETRY, request_id, reason, f"as {new_request_id}")
        await asyncio.shield(self._arrivals.begin(request, digest, *actions).outcome)

    async def obey(self, commands: Sequence[Command]) -> None:
        """What other schedulers ask of this one; of requests that have ended, nothing. Raises Unavailable."""
        self.check_open()
        await self.handovers.take({c.request_id: c.losses for c in commands if c.verb is Verb.TAKE})
        for command in commands:
            match command.verb:
                case Verb.CANCEL | Verb.UPDATE:
                    self._control.carry_out(command)
                case Verb.READ:
                    self._readers.came_elsewhere(command.request_id)
                case Verb.LEAVE:
                    self._readers.left_elsewhere(command.request_id)
        await self._control.durable()

    # ---- reads -----------------------------------------------------------------------------------------------------------------

    async def status(self, request_id: str) -> RequestStatus:
        await self._arrivals.over(request_id)
        stored = await self._lookup.stored(request_id)
        return self.standing(stored)

    async def output(self, request_id: str) -> StoredOutput:
        await self._lookup.stored(request_id)
        return await read_ledger(self._ledger.output, request_id)

    async def transitions(self, request_id: str) -> tuple[StoredTransition, ...]:
        await self._lookup.stored(request_id)
        return await read_ledger(self._ledger.transitions, request_id)

    async def query(self, query: RequestQuery) -> RequestPage:
        return await read_ledger(self._ledger.query, query)

    def standing(self, stored: StoredRequest) -> RequestStatus:
        # A request that waits by the loop's word may still run by the ledger's; one answer must not say both.
        if stored.state not in QUEUED:
            return RequestStatus(stored)
        if stored.lease != self._lookup.lease:
            words = f"scheduler {stored.scheduler} has it" if stored.scheduler else "it is being taken over by another scheduler"
            return RequestStatus(stored, words, WaitCode.ELSEWHERE)
        why = self._loop.scheduler.why_waits(stored.request.request_id)
        return RequestStatus(stored) if why is None else RequestStatus(stored, why.words, why.code)

    def executors(self) -> tuple[ExecutorStatus, ...]:
        return tuple([replace(s, scheduler=self._name) if s.connected else s for s in executor_statuses(self._loop)])

    def load(self) -> Load:
        return load(self._loop, self._writer.backlog)
