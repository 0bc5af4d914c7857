"""What operators hold back (the queue, executors), the policy they set, and the record of it all: an `OperatorDesk`.

A hold is in the ledger and outlives every scheduler; each scheduler on the database looks now and then and does as it says.
Must not know: protobuf, SQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tokenmill_scheduler.core import events
from tokenmill_scheduler.core.events import Event
from tokenmill_scheduler.desk.errors import Unavailable, UnknownExecutor
from tokenmill_scheduler.desk.records import ExecutorStatus, PolicyStatus
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import POLICY, Action, ActionPage, ActionQuery, ActionVerb, Hold
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.ordering_choice import OrderingChoice
from tokenmill_scheduler.overview import executor_statuses
from tokenmill_scheduler.reads import RETRY_DELAY_S, read_ledger

LOOK_INTERVAL_S = 2.0
# A hold's target: an executor's name, POLICY, or the queue.
QUEUE = ""


class Operators:
    """`check_open` raises Unavailable while nothing can be changed."""

    def __init__(self, loop: Loop, ledger: Ledger, check_open: Callable[[], None]) -> None:
        self._loop = loop
        self._ledger = ledger
        self._check_open = check_open
        self._configured = OrderingChoice.of(loop.scheduler.ordering)
        self._log = structlog.get_logger(__name__)
        self._holds: dict[str, Hold] = {}
        # Our own changes: what was read before the last of them was durable is out of date.
        self._begun = self._durable = 0
        # Looks come one after the other: an earlier one must not undo what a later one found.
        self._looking = asyncio.Lock()

    # ---- OperatorDesk ----------------------------------------------------------------------------------------------------------

    async def pause_queue(self, actor: str, reason: str) -> bool:
        return await self._begin(QUEUE, ActionVerb.PAUSE_QUEUE, actor, reason)

    async def resume_queue(self, actor: str, reason: str) -> bool:
        return await self._end(QUEUE, ActionVerb.RESUME_QUEUE, actor, reason)

    async def drain_executor(self, name: str, actor: str, reason: str) -> ExecutorStatus:
        self._executor(name)
        await self._begin(name, ActionVerb.DRAIN_EXECUTOR, actor, reason)
        return self._executor(name)

    async def undrain_executor(self, name: str, actor: str, reason: str) -> ExecutorStatus:
        ended = name not in (QUEUE, POLICY) and await self._end(name, ActionVerb.UNDRAIN_EXECUTOR, actor, reason)
        status = self._find_executor(name)
        if status is None and not ended:
            raise UnknownExecutor(f"no executor '{name}' has joined, and none of that name is drained")
        return status or ExecutorStatus.absent(name)

    def policy(self) -> PolicyStatus:
        hold = self._holds.get(POLICY)
        return PolicyStatus(OrderingChoice.of(self._loop.scheduler.ordering), "" if hold is None else _why(hold))

    async def set_policy(self, choice: OrderingChoice, actor: str, reason: str) -> bool:
        await self._catch_up()
        if choice == OrderingChoice.of(self._loop.scheduler.ordering):
            return False
        hold = Hold(POLICY, actor, reason, self._loop.clock(), str(choice))
        self._holds[POLICY] = hold
        await self._change(choice.event, Action(hold.at_s, actor, ActionVerb.SET_POLICY, POLICY, reason, hold.detail))
        return True

    async def reset_policy(self, actor: str, reason: str) -> bool:
        return await self._end(POLICY, ActionVerb.RESET_POLICY, actor, reason)

    async def actions(self, query: ActionQuery) -> ActionPage:
        return await read_ledger(self._ledger.actions, query)

    # ---- holds -----------------------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Does as the ledger says. Raises LedgerUnavailable."""
        async with self._looking:
            begun, settled = self._begun, self._begun == self._durable
            stored = {hold.target: hold for hold in await asyncio.to_thread(self._ledger.holds)}
            if settled and begun == self._begun:
                self._follow(stored)

    def _follow(self, stored: dict[str, Hold]) -> None:
        for target in [target for target in self._holds if target not in stored]:
            del self._holds[target]
            self._loop.handle(self._released(target))
        for target, hold in stored.items():
            if self._holds.get(target) != hold:
                self._holds[target] = hold
                self._loop.handle(self._held(hold))

    async def watch(self) -> None:
        """Until cancelled: what was changed through another scheduler of this database holds here too."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                await self.refresh()
            except LedgerUnavailable:
                # The writer tells of it.
                continue

    async def _catch_up(self) -> None:
        """Before a change: what it would change may be another since the last look. Raises Unavailable."""
        try:
            await self.refresh()
        except LedgerUnavailable as error:
            raise Unavailable("the database cannot be read for now", RETRY_DELAY_S) from error
        self._check_open()

    async def _begin(self, target: str, verb: ActionVerb, actor: str, reason: str) -> bool:
        """False when it was on hold already: it stays as it is."""
        await self._catch_up()
        if target in self._holds:
            return False
        hold = Hold(target, actor, reason, self._loop.clock())
        self._holds[target] = hold
        await self._change(self._held(hold), Action(hold.at_s, actor, verb, target, reason))
        return True

    async def _end(self, target: str, verb: ActionVerb, actor: str, reason: str) -> bool:
        """False when it was not on hold."""
        await self._catch_up()
        if self._holds.pop(target, None) is None:
            return False
        await self._change(self._released(target), Action(self._loop.clock(), actor, verb, target, reason))
        return True

    async def _change(self, event: Event, action: Action) -> None:
        """Returns once it is durable."""
        self._begun += 1
        self._loop.handle(event, action)
        # Whoever asked for it may go: nothing would be read any more if a change were never counted as durable.
        await asyncio.shield(asyncio.ensure_future(self._settled()))

    async def _settled(self) -> None:
        await self._loop.durable()
        self._durable += 1

    def _executor(self, name: str) -> ExecutorStatus:
        status = self._find_executor(name)
        if status is None:
            raise UnknownExecutor(f"no executor '{name}' has joined")
        return status

    def _find_executor(self, name: str) -> ExecutorStatus | None:
        return next((status for status in executor_statuses(self._loop) if status.name == name), None)

    def _held(self, hold: Hold) -> Event:
        if hold.target == POLICY:
            return self._policy_held(hold)
        return events.QueuePaused(_why(hold)) if hold.target == QUEUE else events.ExecutorDrained(hold.target, _why(hold))

    def _policy_held(self, hold: Hold) -> Event:
        try:
            return OrderingChoice.parse(hold.detail).event
        except ValueError as error:
            self._log.error("the policy that was set is not known here: that of the settings is in force", reason=str(error))
            return self._configured.event

    def _released(self, target: str) -> Event:
        if target == POLICY:
            return self._configured.event
        return events.QueueResumed() if target == QUEUE else events.ExecutorUndrained(target)


def _why(hold: Hold) -> str:
    return f"by {hold.actor}: {hold.reason}" if hold.reason else f"by {hold.actor}"
