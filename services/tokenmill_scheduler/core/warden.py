"""Looks at how the queue and the executors stand, and holds work back while there is too much (see `overload.py`).

What a stage means is asked here by the planner (may the batch lane be admitted now?) and by the shell (are standard requests
taken?). Must not know: plans, the order of the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill_scheduler.core.backlog import Part
from tokenmill_scheduler.core.drain import MEMORY_S
from tokenmill_scheduler.core.effects import OverloadChanged
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.overload import OverloadConfig, OverloadController, Signals, Stage
from tokenmill_scheduler.core.request import Lane
from tokenmill_scheduler.core.roster import Roster

# Looking is cheap, but not free, and there are hundreds of steps a second.
LOOK_INTERVAL_S = 0.1
_BEFORE_BATCH = (Lane.REAL_TIME, Lane.STANDARD)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Of one lane, what waits for room: the longest wait of those that have never run (None: nobody), and the tokens of all."""

    wait_s: float | None
    tokens: int


class Warden:
    def __init__(self, roster: Roster, config: OverloadConfig) -> None:
        self._roster = roster
        self._controller = OverloadController(config)
        self._looked_s = float("-inf")
        self._others_wait = False
        # Models whose requests may run, by executors and operators, each with since when.
        self._open_since_s: dict[str, float] = {}

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

    def opened(self, now_s: float) -> None:
        """Executors or operators have let a queue run, or stopped it: waits count from when it could."""
        before = self._open_since_s
        self._open_since_s = {
            executor.description.model: before.get(executor.description.model, now_s) for executor in self._open()
        }

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

    def _open(self) -> list[ExecutorState]:
        """Executors that may admit, as far as operators go."""
        drained, executors = self._roster.drained, self._roster.executors.values()
        return [] if self._roster.paused else [e for e in executors if e.joined and e.name not in drained]

    def _signals(self, now_s: float) -> Signals:
        """Who waits for something else than room, as a quota, an operator or an executor, is no sign of too much work."""
        real_time, standard = [self._waiting(lane, now_s) for lane in _BEFORE_BATCH]
        self._others_wait = real_time.wait_s is not None or standard.wait_s is not None
        if not self._others_wait:
            return Signals()
        tokens, rate = real_time.tokens + standard.tokens, self._roster.backlog.drain.tokens.per_s(now_s)
        drain_s = tokens / rate if rate else 0.0
        return Signals(real_time.wait_s or 0.0, standard.wait_s or 0.0, drain_s, _kv_pressure(self._open()))

    def _waiting(self, lane: Lane, now_s: float) -> _Waiting:
        waits_s, tokens = [], 0
        for part in self._roster.backlog.parts(lane):
            free_s, oldest_s = self._free_since_s(part, now_s), part.oldest_s
            if free_s is None:
                continue
            if oldest_s is not None:
                waits_s.append(now_s - max(oldest_s, free_s))
            # The rate remembers the time before: of what was let go only now it says nothing.
            if now_s - free_s >= MEMORY_S:
                tokens += part.tokens
        return _Waiting(max(waits_s, default=None), tokens)

    def _free_since_s(self, part: Part, now_s: float) -> float | None:
        """Since when it lacks nothing but room; None: it lacks something else."""
        open_s, limited_s = self._open_since_s.get(part.model), self._roster.quotas.limited_until_s(part.tenant, now_s)
        return None if open_s is None or limited_s > now_s else max(open_s, limited_s)


def _kv_pressure(executors: Sequence[ExecutorState]) -> float:
    """Share of their blocks that is promised or held."""
    total = sum(executor.description.num_blocks for executor in executors)
    return 1 - sum(executor.forecast.free for executor in executors) / total
