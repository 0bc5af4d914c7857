"""Cancel and update, at whichever scheduler has the request: here at once, elsewhere by a command through the ledger.

Must not know: protobuf, SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from tokenmill_scheduler.changes import changes_in_words, has_changed
from tokenmill_scheduler.core import events
from tokenmill_scheduler.core.request import TERMINAL, State
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.ledger.errors import LedgerConflict
from tokenmill_scheduler.ledger.records import Action, ActionVerb, Command, StoredRequest, Verb
from tokenmill_scheduler.live import RequestView
from tokenmill_scheduler.lookup import ChangingHands, Lookup
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.reads import RETRY_DELAY_S
from tokenmill_scheduler.relay import Relay


@dataclass(frozen=True, slots=True)
class Tries:
    """What the tries of one change have come to together.

    `before`: each choice's state when it was first seen. `changed`: the choices that are known to be changed; none is a second
    time, for what another has changed since would be undone.
    """

    before: dict[str, State] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)


class Control:
    """`check_open` raises Unavailable while nothing can be changed."""

    def __init__(self, loop: Loop, relay: Relay, lookup: Lookup, check_open: Callable[[], None]) -> None:
        self._loop = loop
        self._relay = relay
        self._lookup = lookup
        self._check_open = check_open

    async def change(self, command: Command, tries: Tries) -> dict[str, State]:
        """At every scheduler that has choices of the request which have not ended. Returns the states of all after that, by id.

        Raises ChangingHands when one is, and may have changed others then: a change can be given again, with the same `tries`.
        """
        choices = await self._lookup.choices(command.request_id)
        for found in choices:
            tries.before.setdefault(found.request.request_id, found.state)
        # As they are now: a live request's is another once it is updated.
        requests = {found.request.request_id: found.request for found in choices}
        holders: dict[int | None, RequestView | StoredRequest] = {}
        for found in choices:
            if found.state not in TERMINAL and found.request.request_id not in tries.changed:
                holders.setdefault(_holder(found), found)
        after = [await self._change_at(lease, found, command, tries) for lease, found in holders.items()]
        if not after:
            # Their end may not be durable yet.
            await self.durable()
            after = choices
        elif len(choices) > 1:
            after = await self._lookup.choices(command.request_id)
        tries.changed.update([name for f in after if has_changed(requests[name := f.request.request_id], f.request, command)])
        if any(found.state not in TERMINAL and found.request.request_id not in tries.changed for found in after):
            # One was on its way in or out, where nobody changes it.
            raise ChangingHands
        return {found.request.request_id: found.state for found in after}

    async def _change_at(
        self, lease: int | None, found: RequestView | StoredRequest, command: Command, tries: Tries
    ) -> RequestView | StoredRequest:
        """At the scheduler that has this choice, all that it has of the request. Returns the choice as it is then."""
        command = replace(command, detail=changes_in_words(found.request, command.priority, command.deadline_s))
        if lease is not None:
            # The action is recorded there, with the change: also when this one's caller has gone meanwhile.
            await self._relay.ask(replace(command, lease=lease))
            return await self._lookup.stored(found.request.request_id)
        self._check_open()
        tries.changed.update(self.carry_out(command, tries.changed))
        await self.durable()
        return found

    def carry_out(self, command: Command, but: Collection[str] = ()) -> list[str]:
        """A cancel or an update, on all choices here that have not ended, or the one that is named; not on those of `but`.

        Returns which were changed. A command that comes twice finds its request as it left it, and an ended one is not cancelled
        again.
        """
        choices = [choice for choice in self._loop.live.choices(command.request_id) if choice not in but]
        is_cancel = command.verb is Verb.CANCEL
        verb = ActionVerb.CANCEL if is_cancel else ActionVerb.UPDATE
        actions = self.actions(command.actor, verb, command.request_id, command.reason, command.detail) if choices else ()
        for choice in choices:
            cancelled = events.Cancelled(choice, command.reason)
            self._loop.handle(cancelled if is_cancel else events.Updated(choice, command.priority, command.deadline_s), *actions)
            actions = ()
        return choices

    def actions(self, actor: str, verb: ActionVerb, request_id: str, reason: str, detail: str = "") -> tuple[Action, ...]:
        """The record of what an operator does; none of what a client does."""
        return (Action(self._loop.clock(), actor, verb, request_id, reason, detail),) if actor else ()

    async def durable(self) -> None:
        """Returns once all that the loop has done is. Raises Unavailable."""
        try:
            await self._loop.durable()
        except LedgerConflict as error:
            raise Unavailable(f"the scheduler stops: {error}", RETRY_DELAY_S) from error


def _holder(found: RequestView | StoredRequest) -> int | None:
    """The lease of the scheduler that has it, None for this one. Raises ChangingHands for one that has fallen."""
    if isinstance(found, RequestView):
        return None
    if found.lease is None or not found.scheduler:
        raise ChangingHands
    return found.lease
