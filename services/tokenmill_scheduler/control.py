"""Cancel and update, at whichever scheduler has the request: here at once, elsewhere by a command through the ledger.

Must not know: protobuf, SQL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tokenmill_scheduler.changes import changes_in_words, has_changed
from tokenmill_scheduler.core import events
from tokenmill_scheduler.core.request import TERMINAL, State
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.ledger.errors import LedgerConflict
from tokenmill_scheduler.ledger.records import Action, ActionVerb, Command, StoredRequest, Verb
from tokenmill_scheduler.live import LiveRequest
from tokenmill_scheduler.lookup import ChangingHands, Lookup
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.reads import RETRY_DELAY_S
from tokenmill_scheduler.relay import Relay


class Control:
    """`check_open` raises Unavailable while nothing can be changed."""

    def __init__(self, loop: Loop, relay: Relay, lookup: Lookup, check_open: Callable[[], None]) -> None:
        self._loop = loop
        self._relay = relay
        self._lookup = lookup
        self._check_open = check_open

    async def change(self, command: Command, before: dict[str, State]) -> dict[str, State]:
        """At every scheduler that has choices of the request which have not ended. Returns the states of all after that, by id.

        Raises ChangingHands when one is, and may have changed others then: a change can be given again. `before` is kept from try
        to try: each choice's state when it was first seen, which tells what the tries have done together.
        """
        choices = await self._lookup.choices(command.request_id)
        for found in choices:
            before.setdefault(found.request.request_id, found.state)
        holders: dict[int | None, LiveRequest | StoredRequest] = {}
        for found in choices:
            if found.state not in TERMINAL:
                holders.setdefault(None if isinstance(found, LiveRequest) else found.lease, found)
        after = [await self._change_at(found, command) for found in holders.values()]
        if not after:
            # Their end may not be durable yet.
            await self.durable()
            after = choices
        elif len(choices) > 1:
            after = await self._lookup.choices(command.request_id)
            for found in after:
                self._check_changed(found, command)
        return {found.request.request_id: found.state for found in after}

    async def _change_at(self, found: LiveRequest | StoredRequest, command: Command) -> LiveRequest | StoredRequest:
        """At the scheduler that has this choice, all that it has of the request. Returns the choice as it is then."""
        command = replace(command, detail=changes_in_words(found.request, command.priority, command.deadline_s))
        if not isinstance(found, LiveRequest):
            return await self._ask(found, command)
        self._check_open()
        self.carry_out(command)
        await self.durable()
        return found

    def _check_changed(self, found: LiveRequest | StoredRequest, command: Command) -> None:
        """Raises ChangingHands for one that is on its way in or out, where nobody changes it."""
        if found.state not in TERMINAL and not has_changed(found.request, command):
            raise ChangingHands

    async def _ask(self, stored: StoredRequest, command: Command) -> StoredRequest:
        """Has the scheduler that has it change the request, of which `stored` is a choice. Returns that one as it is then.

        Raises ChangingHands, also when that one has fallen. The action is recorded there, with the change: also when this one's
        caller has gone meanwhile.
        """
        if stored.lease is None or not stored.scheduler:
            raise ChangingHands
        await self._relay.ask(replace(command, lease=stored.lease))
        after = await self._lookup.stored(stored.request.request_id)
        self._check_changed(after, command)
        return after

    def carry_out(self, command: Command) -> None:
        """A cancel or an update, on all choices here that have not ended, or the one that is named.

        A command that comes twice finds its request as it left it, and an ended one is not cancelled again.
        """
        choices = self._loop.live.choices(command.request_id)
        is_cancel = command.verb is Verb.CANCEL
        verb = ActionVerb.CANCEL if is_cancel else ActionVerb.UPDATE
        actions = self.actions(command.actor, verb, command.request_id, command.reason, command.detail) if choices else ()
        for choice in choices:
            cancelled = events.Cancelled(choice, command.reason)
            self._loop.handle(cancelled if is_cancel else events.Updated(choice, command.priority, command.deadline_s), *actions)
            actions = ()

    def actions(self, actor: str, verb: ActionVerb, request_id: str, reason: str, detail: str = "") -> tuple[Action, ...]:
        """The record of what an operator does; none of what a client does."""
        return (Action(self._loop.clock(), actor, verb, request_id, reason, detail),) if actor else ()

    async def durable(self) -> None:
        """Returns once all that the loop has done is. Raises Unavailable."""
        try:
            await self._loop.durable()
        except LedgerConflict as error:
            raise Unavailable(f"the scheduler stops: {error}", RETRY_DELAY_S) from error
