"""An `OperatorDesk` in memory, with two executors: `x1` and `x2`."""

from __future__ import annotations

from itertools import count

from tokenmill_scheduler.core.records import Blocks
from tokenmill_scheduler.desk import ExecutorStatus, UnknownExecutor
from tokenmill_scheduler.ledger.port import Action, ActionPage, ActionQuery, ActionVerb

from tests.fakes.memory_actions import MemoryActions


class FakeOperators:
    def __init__(self) -> None:
        self._actions = MemoryActions()
        self._clock = count(1_700_000_000)

    async def pause_queue(self, actor: str, reason: str) -> bool:
        return self._do(ActionVerb.PAUSE_QUEUE, "", actor, reason)

    async def resume_queue(self, actor: str, reason: str) -> bool:
        return self._do(ActionVerb.RESUME_QUEUE, "", actor, reason)

    async def drain_executor(self, name: str, actor: str, reason: str) -> ExecutorStatus:
        self._executor(name)
        self._do(ActionVerb.DRAIN_EXECUTOR, name, actor, reason)
        return self._executor(name)

    async def undrain_executor(self, name: str, actor: str, reason: str) -> ExecutorStatus:
        self._executor(name)
        self._do(ActionVerb.UNDRAIN_EXECUTOR, name, actor, reason)
        return self._executor(name)

    async def actions(self, query: ActionQuery) -> ActionPage:
        return self._actions.query(query)

    def _do(self, verb: ActionVerb, target: str, actor: str, reason: str) -> bool:
        before = [hold.target for hold in self._actions.holds()]
        self._actions.record(Action(float(next(self._clock)), actor, verb, target, reason))
        return [hold.target for hold in self._actions.holds()] != before

    def _executor(self, name: str) -> ExecutorStatus:
        if name not in ("x1", "x2"):
            raise UnknownExecutor(f"no executor {name} has joined")
        draining = name in [hold.target for hold in self._actions.holds()]
        return ExecutorStatus(name, "127.0.0.1:1", "tiny", True, 1, "simulated", 16, Blocks(1, 0, 0), 0, 0, 0.0, None, draining)
