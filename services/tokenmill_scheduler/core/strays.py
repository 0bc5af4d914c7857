"""Waiting requests that nobody here can run and an executor of another scheduler can: they are to go there.

Asks, changes nothing. Must not know: how a request gets there, plans.
"""

from __future__ import annotations

from itertools import islice

from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.room import Room
from tokenmill_scheduler.core.roster import Roster

# Of a queue that is served here so many are looked at: those that nobody here can hold are passed by others, and come to its head.
LOOKED_AT = 200


class Strays:
    def __init__(self, roster: Roster, room: Room) -> None:
        self._roster = roster
        self._room = room

    def find(self, patience_s: float) -> dict[str, tuple[str, ...]]:
        """Request ids by the executor that is to run them. One that is lost here, or awaited, is waited for so long."""
        since_s = self._roster.now_s - patience_s
        if self._roster.awaited and self._roster.awaited_s > since_s:
            return {}
        found: dict[str, list[str]] = {}
        for model, queue in self._roster.queues.items():
            there = [e for e in self._roster.known.values() if e.joined and self._is_open(e, model)]
            here = [e for e in self._roster.executors.values() if self._is_open(e, model) and self._is_there(e, since_s)]
            for live in islice(queue, LOOKED_AT if here else None) if there else ():
                executor = None if live.sequence or self._first(here, live) else self._first(there, live)
                if executor is not None:
                    found.setdefault(executor.name, []).extend([choice.request_id for choice in live.gang or (live,)])
        return {name: tuple(request_ids) for name, request_ids in found.items()}

    def _is_open(self, executor: ExecutorState, model: str) -> bool:
        return executor.description.model == model and executor.name not in self._roster.drained

    def _is_there(self, executor: ExecutorState, since_s: float) -> bool:
        other = self._roster.known.get(executor.name)
        return executor.joined or (executor.lost_s > since_s and not (other is not None and other.joined))

    def _first(self, executors: list[ExecutorState], live: LiveRequest) -> ExecutorState | None:
        return next((executor for executor in executors if self._room.can_hold(executor, live)), None)
