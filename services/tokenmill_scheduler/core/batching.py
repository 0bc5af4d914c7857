"""How many requests an executor may admit now: at every step (continuous), or a batch at a time (static).

Must not know: policies, blocks, plans.
"""

from __future__ import annotations

from typing import Protocol

from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.queue import WaitingQueue


class Batching(Protocol):
    name: str
    # Whether a running sequence may be given up for the sake of a waiting one.
    displaces: bool

    def open_slots(self, executor: ExecutorState, queue: WaitingQueue, now_s: float) -> int:
        """Requests that may be admitted to the plan being made."""

    def wakeup_s(self, executor: ExecutorState, queue: WaitingQueue) -> float | None:
        """When `open_slots` will change although nothing happens."""

    def is_closed(self, executor: ExecutorState) -> bool:
        """Whether it admits nobody, whoever waits."""


class Continuous:
    """The batch is decided anew at every step (Orca, OSDI 2022)."""

    name = "continuous"
    displaces = True

    def open_slots(self, executor: ExecutorState, queue: WaitingQueue, now_s: float) -> int:
        return executor.open_slots

    def wakeup_s(self, executor: ExecutorState, queue: WaitingQueue) -> float | None:
        return None

    def is_closed(self, executor: ExecutorState) -> bool:
        return executor.slots_taken >= executor.max_num_seqs


class Static:
    """A batch starts when it is full or its oldest request has waited `max_waiting_time_s`, and runs to the end of all its members.

    Its members may be admitted over several plans, as the token budget allows; one that is preempted comes back into its batch.
    """

    name = "static"
    displaces = False

    def __init__(self, max_waiting_time_s: float) -> None:
        self._max_waiting_time_s = max_waiting_time_s

    def open_slots(self, executor: ExecutorState, queue: WaitingQueue, now_s: float) -> int:
        executor.batch_room = min(executor.batch_room, len(queue))
        # Also when a batch has room left over: those it could not take in, as too many choices at once, have to begin another.
        if not executor.running and self._starts(executor, queue, now_s):
            executor.batch_room = min(len(queue), executor.max_num_seqs)
        return min(executor.batch_room, executor.open_slots)

    def wakeup_s(self, executor: ExecutorState, queue: WaitingQueue) -> float | None:
        oldest_s = queue.oldest_arrival_s
        if oldest_s is None or executor.running:
            return None
        return oldest_s + self._max_waiting_time_s

    def is_closed(self, executor: ExecutorState) -> bool:
        return executor.batch_room == 0

    def _starts(self, executor: ExecutorState, queue: WaitingQueue, now_s: float) -> bool:
        oldest_s = queue.oldest_arrival_s
        if oldest_s is None:
            return False
        return len(queue) >= executor.max_num_seqs or now_s >= oldest_s + self._max_waiting_time_s


BATCHING_MODES = (Continuous.name, Static.name)


def batching_named(name: str, max_waiting_time_s: float) -> Batching:
    """Raises KeyError when there is no such mode."""
    modes: dict[str, Batching] = {mode.name: mode for mode in (Continuous(), Static(max_waiting_time_s))}
    return modes[name]
