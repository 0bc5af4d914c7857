"""An `OperatorDesk` in memory, with two executors: `x1` and `x2`."""

from __future__ import annotations

from itertools import count

from tokenmill_scheduler.core.lanes import DEFAULT_LANE_SHARES
from tokenmill_scheduler.core.plans import Blocks
from tokenmill_scheduler.desk.errors import UnknownExecutor
from tokenmill_scheduler.desk.records import ExecutorStatus, PolicyStatus
from tokenmill_scheduler.ledger.records import POLICY, Action, ActionPage, ActionQuery, ActionVerb
from tokenmill_scheduler.ordering_choice import OrderingChoice

from tests.fakes.memory_actions import MemoryActions

_CONFIGURED = OrderingChoice("fcfs", False, DEFAULT_LANE_SHARES)


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

    def policy(self) -> PolicyStatus:
        held = [hold for hold in self._actions.holds() if hold.target == POLICY]
        return PolicyStatus(OrderingChoice.parse(held[0].detail), f"by {held[0].actor}") if held else PolicyStatus(_CONFIGURED)

    async def set_policy(self, choice: OrderingChoice, actor: str, reason: str) -> bool:
        if choice == self.policy().choice:
            return False
        return self._do(ActionVerb.SET_POLICY, POLICY, actor, reason, str(choice))

    async def reset_policy(self, actor: str, reason: str) -> bool:
        return self._do(ActionVerb.RESET_POLICY, POLICY, actor, reason)

    async def actions(self, query: ActionQuery) -> ActionPage:
        return self._actions.query(query)

    def _do(self, verb: ActionVerb, target: str, actor: str, reason: str, detail: str = "") -> bool:
        before = [(hold.target, hold.detail) for hold in self._actions.holds()]
        self._actions.record(Action(float(next(self._clock)), actor, verb, target, reason, detail))
        return [(hold.target, hold.detail) for hold in self._actions.holds()] != before

    def _executor(self, name: str) -> ExecutorStatus:
        if name not in ("x1", "x2"):
            raise UnknownExecutor(f"no executor '{name}' has joined")
        draining = name in [hold.target for hold in self._actions.holds()]
        return ExecutorStatus(name, "127.0.0.1:1", "tiny", True, 1, "simulated", 16, Blocks(1, 0, 0), 0, 0, 0.0, None, draining)
