"""Looks at how the queue and the executors stand, and holds work back while there is too much (see `overload.py`).

What a stage means is asked here by the planner (may the batch lane be admitted now?) and by the shell (are standard requests
taken?). Must not know: plans, the order of the queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.overload import OverloadConfig, OverloadController, Signals, Stage
from tokenmill_scheduler.core.records import OverloadChanged
from tokenmill_scheduler.core.request import Lane
from tokenmill_scheduler.core.roster import Roster

# Looking is cheap, but not free, and there are hundreds of steps a second.
LOOK_INTERVAL_S = 0.1
_BEFORE_BATCH = (Lane.REAL_TIME, Lane.STANDARD)


class Warden:
    def __init__(self, roster: Roster, config: OverloadConfig) -> None:
        self._roster = roster
        self._controller = OverloadController(config)
        self._looked_s = float("-inf")
        self._others_wait = False

    @property
    def stage(self) -> Stage:
        return self._controller.stage

    @property
    def why(self) -> str:
        return self._controller.why

    def look(self, now_s: float) -> None:
        """Changes the stage when it is time to; the change is an effect."""
        # As `next_look_s` adds it: by the difference, rounding could put the look off for ever.
        if now_s < self._looked_s + LOOK_INTERVAL_S:
            return
        self._looked_s = now_s
        before = self._controller.stage
        if self._controller.sample(self._signals(now_s), now_s):
            self._roster.counters.overload_changes += 1
            self._roster.effects.append(OverloadChanged(int(before), int(self.stage), self.why, now_s))

    def next_look_s(self) -> float | None:
        """When to look again although nothing happens, so that what is held back is let go again by itself."""
        return self._looked_s + LOOK_INTERVAL_S if self.stage else None

    def holds_batch(self, executor: ExecutorState) -> bool:
        """Whether the batch lane is kept off an executor for now: always, or while others wait or its own batch runs there."""
        if self.stage is Stage.NORMAL:
            return False
        if self.stage > Stage.BATCH_LEFTOVER or self._others_wait:
            return True
        return any(s.live is not None and s.live.request.lane is Lane.BATCH for s in executor.running.values())

    def _signals(self, now_s: float) -> Signals:
        """Who waits for something else than room, as a quota, an operator or an executor, is no sign of too much work."""
        drained, executors = self._roster.drained, self._roster.executors.values()
        joined = [executor for executor in executors if executor.joined and executor.name not in drained]
        backlog, quotas = self._roster.backlog, self._roster.quotas
        waits = [backlog.longest_wait_s(lane, now_s, lambda tenant: not quotas.limits(tenant, now_s)) for lane in _BEFORE_BATCH]
        self._others_wait = waits != [None, None]
        if self._roster.paused or not joined or not self._others_wait:
            return Signals()
        tokens, rate = backlog.tokens(*_BEFORE_BATCH), backlog.drain.tokens.per_s(now_s)
        return Signals(waits[0] or 0.0, waits[1] or 0.0, tokens / rate if rate else 0.0, _kv_pressure(joined))


def _kv_pressure(executors: Sequence[ExecutorState]) -> float:
    """Share of their blocks that is promised or held."""
    total = sum(executor.description.num_blocks for executor in executors)
    return 1 - sum(executor.forecast.free for executor in executors) / total
