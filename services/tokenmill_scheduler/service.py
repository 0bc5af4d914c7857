"""The desk: what servicers may ask, answered from the loop, which owns the live requests, and the ledger, which owns the truth.

Reads go to the ledger in a thread. What readers are told is durable first, so a read is never older than what was told.
Must not know: protobuf, SQL, the plan protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from tokenmill_scheduler.arrivals import Arrivals
from tokenmill_scheduler.changes import changes_in_words, has_changed, second_try
from tokenmill_scheduler.core import records as core
from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.core.choices import choice_ids
from tokenmill_scheduler.core.request import QUEUED, TERMINAL, Request, State
from tokenmill_scheduler.core.waiting import WaitCode
from tokenmill_scheduler.desk import (
    Attachment,
    Cancellation,
    ExecutorStatus,
    Load,
    RequestEnded,
    RequestExists,
    RequestNotFailed,
    RequestStatus,
    ServedModel,
    Submitted,
    Unavailable,
    UnknownRequest,
)
from tokenmill_scheduler.followers import Followers, ended
from tokenmill_scheduler.gate import Gate
from tokenmill_scheduler.handover import PATIENCE_S, Handovers
from tokenmill_scheduler.ledger.port import (
    Action,
    ActionVerb,
    Command,
    Lease,
    Ledger,
    LedgerConflict,
    Outcome,
    RequestPage,
    RequestQuery,
    StoredOutput,
    StoredRequest,
    StoredTransition,
    Verb,
)
from tokenmill_scheduler.live import LiveRequest
from tokenmill_scheduler.loop import Loop, RecordWriter
from tokenmill_scheduler.models import Models
from tokenmill_scheduler.reads import RETRY_DELAY_S, read_ledger
from tokenmill_scheduler.relay import Relay
from tokenmill_scheduler.streams import Feed, FeedReader, check_index
from tokenmill_scheduler.tenants import TenantLimits

ANNOUNCE_S = 10.0
# How often a request that changes hands is looked for, and what a takeover takes beyond the lease time.
SETTLE_POLL_S = 0.1
TAKEOVER_S = 2.0

T = TypeVar("T")

_NO_OUTPUT = StoredOutput(0, ())
# The lease of a command that is not addressed yet.
_NOBODY = 0


class _ChangingHands(Exception):
    """A request is between two schedulers: neither changes or reads it until it has come to the other."""


@dataclass(frozen=True, slots=True)
class _Readable:
    """A request to be read, with its output from the ledger if it does not run here."""

    found: LiveRequest | StoredRequest
    output: StoredOutput = _NO_OUTPUT

    @property
    def num_tokens(self) -> int:
        """Those that may be told."""
        return self.found.feed.committed if isinstance(self.found, LiveRequest) else len(self.output.token_ids)


class Service:
    """Implements `Desk`."""

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
        self._settle_limit_s = patience_s + TAKEOVER_S
        self._closed = False
        # Of this scheduler's lease: which requests are its own.
        self._lease: int | None = None
        self._name = ""
        self.relay = Relay(ledger)
        self.followers = Followers(ledger, self.relay.tell, announce_s)
        self.handovers = Handovers(loop, ledger, writer, self.followers.hand_over, patience_s)

    def open(self, lease: Lease) -> None:
        """Requests of this lease are this scheduler's, others are changed and followed through the ledger."""
        self._lease = lease.number
        self._name = lease.scheduler
        self.handovers.open(lease)

    def close(self) -> None:
        """No submits or changes from here on; a reader's leaving cancels nothing any more."""
        self._closed = True

    def check_open(self) -> None:
        """Raises Unavailable while nothing can be changed."""
        if self._closed:
            raise Unavailable("the scheduler is shutting down", RETRY_DELAY_S)
        if self._writer.outage is not None:
            raise Unavailable("the database cannot be written for now", RETRY_DELAY_S)

    def close_streams(self, reason: Unavailable) -> None:
        self._loop.live.close_streams(reason)
        self.followers.close(reason)

    def model(self, name: str) -> ServedModel:
        return self._models.find(name)

    def models(self) -> tuple[ServedModel, ...]:
        return self._models.all()

    def most_choices(self, model: str, num_prompt_tokens: int, max_tokens: int) -> int | None:
        return self._loop.scheduler.most_choices(model, num_prompt_tokens, max_tokens)

    # ---- submit ----------------------------------------------------------------------------------------------------------------

    async def submit(self, request: Request, payload_digest: bytes) -> Submitted:
        self.check_open()
        outcome = await self._arrivals.take(request, payload_digest)
        if outcome is Outcome.CONFLICT:
            raise RequestExists(f"request {request.request_id} exists with another payload")
        return Submitted(request.request_id, joined=outcome is Outcome.JOINED)

    # ---- streams ---------------------------------------------------------------------------------------------------------------

    async def attach(self, request_id: str, next_index: int) -> Attachment:
        return (await self.attach_all({request_id: next_index}))[0]

    async def attach_all(self, next_indexes: Mapping[str, int]) -> tuple[Attachment, ...]:
        return await self._once_settled(partial(self._attach_all, next_indexes))

    async def _attach_all(self, next_indexes: Mapping[str, int]) -> tuple[Attachment, ...]:
        # All is looked up before anybody reads: to leave again would cancel what nobody else reads.
        while True:
            found = {request_id: await self._look_up_output(request_id) for request_id in next_indexes}
            if not any(self._has_come_here(readable) for readable in found.values()):
                break
        for request_id, next_index in next_indexes.items():
            check_index(next_index, found[request_id].num_tokens)
        return tuple([self._attach(found[request_id], next_index) for request_id, next_index in next_indexes.items()])

    async def _look_up_output(self, request_id: str) -> _Readable:
        found = await self._look_up(request_id)
        if isinstance(found, LiveRequest):
            return _Readable(found)
        return _Readable(found, await read_ledger(self._ledger.output, request_id))

    def _has_come_here(self, readable: _Readable) -> bool:
        """Whether it was taken over while the ledger was read."""
        found = readable.found
        return not isinstance(found, LiveRequest) and self._loop.live.runs(found.request.request_id)

    def _attach(self, readable: _Readable, next_index: int) -> Attachment:
        found, output = readable.found, readable.output
        request_id = found.request.request_id
        left = partial(self._reader_left, request_id)
        if isinstance(found, LiveRequest):
            reader = FeedReader(found.feed, next_index, left)
            self._loop.live.reader_came(request_id)
            return Attachment(found.request, tuple(found.feed.tokens[:next_index]), reader)
        if found.state not in TERMINAL:
            reader = self.followers.follow(found, output, next_index, left)
            return Attachment(found.request, output.token_ids[:next_index], reader)
        feed = Feed(output.token_ids, output.logprobs)
        feed.end(ended(found))
        return Attachment(found.request, output.token_ids[:next_index], FeedReader(feed, next_index, lambda: None))

    def _reader_left(self, request_id: str) -> None:
        """It may have come when another scheduler had the request."""
        if self._closed:
            return
        self.followers.left(request_id)
        if self._loop.live.reader_left(request_id, self._loop.clock()):
            self._loop.handle(core.Cancelled(request_id, "its client left"))

    # ---- changes ---------------------------------------------------------------------------------------------------------------

    async def cancel(self, request_id: str, reason: str, actor: str = "") -> Cancellation:
        command = Command(_NOBODY, request_id, Verb.CANCEL, reason, actor=actor)
        states = await self._once_settled(partial(self._change, command))
        return Cancellation(states[0][0], already_ended=all(had_ended for _, had_ended in states))

    async def update(
        self, request_id: str, priority: int | None, deadline_s: float | None, reason: str = "", actor: str = ""
    ) -> RequestStatus:
        command = Command(_NOBODY, request_id, Verb.UPDATE, reason, priority, deadline_s, actor)
        states = await self._once_settled(partial(self._change, command))
        if all(state in TERMINAL for state, _ in states):
            raise RequestEnded(f"request {request_id} has ended: {states[0][0]}")
        return await self.status(request_id)

    async def _change(self, command: Command) -> list[tuple[State, bool]]:
        """At every scheduler that has choices of the request which have not ended; as `_change_at`, for each.

        Raises _ChangingHands when one is, and may have changed others then: a change can be given again.
        """
        choices = await self._choices(command.request_id)
        holders: dict[int | None, LiveRequest | StoredRequest] = {}
        for found in choices:
            if found.state not in TERMINAL:
                holders.setdefault(None if isinstance(found, LiveRequest) else found.lease, found)
        states = [await self._change_at(found, command) for found in holders.values() or choices[:1]]
        for found in await self._choices(command.request_id) if len(choices) > 1 else ():
            self._check_changed(found, command)
        return states

    async def _change_at(self, found: LiveRequest | StoredRequest, command: Command) -> tuple[State, bool]:
        """At the scheduler that has this choice, all that it has of the request. Returns its state, and if it had ended before."""
        if found.state in TERMINAL:
            await self._durable()
            return found.state, True
        command = replace(command, detail=changes_in_words(found.request, command.priority, command.deadline_s))
        if isinstance(found, LiveRequest):
            self.check_open()
            self._carry_out(command)
            await self._durable()
            self._check_changed(found, command)
            return found.state, False
        after = await self._ask(found, command)
        return after.state, after.state in TERMINAL and after.state is not State.CANCELLED

    def _check_changed(self, found: LiveRequest | StoredRequest, command: Command) -> None:
        """Raises _ChangingHands for one that is on its way in or out, where nobody changes it."""
        if found.state not in TERMINAL and not has_changed(found.request, command):
            raise _ChangingHands

    async def _ask(self, stored: StoredRequest, command: Command) -> StoredRequest:
        """Has the scheduler that has it change the request, of which `stored` is a choice. Returns that one as it is then.

        Raises _ChangingHands, also when that one has fallen. The action is recorded there, with the change: also when this one's
        caller has gone meanwhile.
        """
        if stored.lease is None or not stored.scheduler:
            raise _ChangingHands
        await self.relay.ask(replace(command, lease=stored.lease))
        after = await self._find(stored.request.request_id)
        self._check_changed(after, command)
        return after

    def _carry_out(self, command: Command) -> None:
        """A cancel or an update, on all choices here that have not ended, or the one that is named.

        A command that comes twice finds its request as it left it, and an ended one is not cancelled again.
        """
        choices = self._loop.live.choices(command.request_id)
        is_cancel = command.verb is Verb.CANCEL
        verb = ActionVerb.CANCEL if is_cancel else ActionVerb.UPDATE
        actions = self._actions(command.actor, verb, command.request_id, command.reason, command.detail) if choices else ()
        for choice in choices:
            cancelled = core.Cancelled(choice, command.reason)
            self._loop.handle(cancelled if is_cancel else core.Updated(choice, command.priority, command.deadline_s), *actions)
            actions = ()

    async def retry(self, request_id: str, new_request_id: str, reason: str, actor: str) -> None:
        self.check_open()
        stored = await self._find(request_id)
        if stored.state is not State.FAILED:
            raise RequestNotFailed(f"request {request_id} is {stored.state}: only a failed one can be tried again")
        digest = await read_ledger(self._ledger.payload_digest, request_id)
        if digest is None:
            raise UnknownRequest(f"there is no request {request_id} any more")
        request = second_try(stored.request, new_request_id, self._loop.clock())
        actions = self._actions(actor, ActionVerb.RETRY, request_id, reason, f"as {new_request_id}")
        await asyncio.shield(self._arrivals.begin(request, digest, *actions).outcome)

    def _actions(self, actor: str, verb: ActionVerb, request_id: str, reason: str, detail: str = "") -> tuple[Action, ...]:
        """The record of what an operator does; none of what a client does."""
        return (Action(self._loop.clock(), actor, verb, request_id, reason, detail),) if actor else ()

    async def obey(self, commands: Sequence[Command]) -> None:
        """What other schedulers ask of this one; of requests that have ended, nothing. Raises Unavailable."""
        self.check_open()
        # Whoever asks looks at the ledger then: what is on its way is to be there.
        await self.handovers.settled()
        await self.handovers.take({c.request_id: c.losses for c in commands if c.verb is Verb.TAKE})
        for command in commands:
            match command.verb:
                case Verb.CANCEL | Verb.UPDATE:
                    self._carry_out(command)
                case Verb.READ:
                    self._loop.live.read_elsewhere(command.request_id, self._loop.clock())
                case Verb.LEAVE:
                    if self._loop.live.left_elsewhere(command.request_id):
                        self._loop.handle(core.Cancelled(command.request_id, "its client left"))
        await self._durable()

    async def _durable(self) -> None:
        try:
            await self._loop.durable()
        except LedgerConflict as error:
            raise Unavailable(f"the scheduler stops: {error}", RETRY_DELAY_S) from error

    # ---- reads -----------------------------------------------------------------------------------------------------------------

    async def status(self, request_id: str) -> RequestStatus:
        await self._arrivals.over(request_id)
        stored = await self._find(request_id)
        return self.standing(stored)

    async def output(self, request_id: str) -> StoredOutput:
        await self._find(request_id)
        return await read_ledger(self._ledger.output, request_id)

    async def transitions(self, request_id: str) -> tuple[StoredTransition, ...]:
        await self._find(request_id)
        return await read_ledger(self._ledger.transitions, request_id)

    async def query(self, query: RequestQuery) -> RequestPage:
        return await read_ledger(self._ledger.query, query)

    def standing(self, stored: StoredRequest) -> RequestStatus:
        # A request that waits by the loop's word may still run by the ledger's; one answer must not say both.
        if stored.state not in QUEUED:
            return RequestStatus(stored)
        if stored.lease != self._lease:
            words = f"scheduler {stored.scheduler} has it" if stored.scheduler else "it is being taken over by another scheduler"
            return RequestStatus(stored, words, WaitCode.ELSEWHERE)
        why = self._loop.why_waits(stored.request.request_id)
        return RequestStatus(stored) if why is None else RequestStatus(stored, why.words, why.code)

    def executors(self) -> tuple[ExecutorStatus, ...]:
        return tuple([replace(s, scheduler=self._name) if s.connected else s for s in self._loop.executors()])

    def load(self) -> Load:
        return self._loop.load()

    async def _choices(self, request_id: str) -> list[LiveRequest | StoredRequest]:
        """All of the request, or the one that is named. Raises as `_look_up`."""
        first = await self._look_up(request_id)
        return [first, *[await self._look_up(other) for other in choice_ids(first.request)[1:]]]

    async def _look_up(self, request_id: str) -> LiveRequest | StoredRequest:
        """The live request, or else the one from the ledger, ended or another's. Raises UnknownRequest, _ChangingHands."""
        await self._arrivals.over(request_id)
        # It can end between the look at the live requests and that at the ledger, or arrive: then the second look finds it.
        for _ in range(2):
            if (live := self._loop.live.get(request_id)) is not None:
                return live
            stored = await self._find(request_id)
            if stored.state in TERMINAL or stored.lease != self._lease:
                return stored
        raise _ChangingHands

    async def _once_settled(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What `attempt` gives, begun again as long as its request changes hands.

        Raises Unavailable when that takes longer than to take over from a scheduler that has fallen.
        """
        try:
            async with asyncio.timeout(self._settle_limit_s):
                while True:
                    try:
                        return await attempt()
                    except _ChangingHands:
                        self.check_open()
                        await asyncio.sleep(SETTLE_POLL_S)
        except TimeoutError:
            raise Unavailable("the request changes hands, or the scheduler that has it does not answer", RETRY_DELAY_S) from None

    async def _find(self, request_id: str) -> StoredRequest:
        stored = await read_ledger(self._ledger.find, request_id)
        if stored is None:
            raise UnknownRequest(f"there is no request {request_id}")
        return stored
