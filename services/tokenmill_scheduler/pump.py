"""When the core is asked for plans: at each executor when its pacer says so, and when time alone may have changed something.

Asked once in a turn of the event loop, after all its events (`soon`), or at once where an executor may have nothing to do (`run`).
No plan is asked for while the writer's backlog is full. Must not know: what is in a plan, SQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic

from tokenmill_scheduler.core.events import Event, PlanDue, Tick
from tokenmill_scheduler.core.scheduler import Scheduler
from tokenmill_scheduler.drive import Drive
from tokenmill_scheduler.recorder import RecordWriter

# A wake-up that has passed already but waits for an executor is not looked at in a busy loop.
MIN_WAKEUP_S = 0.005
# Event loops keep time in milliseconds, and uvloop's short timers end at once: what is due sooner than this is due now.
TIMER_TICK_S = 0.001
# Pacers go by `monotonic`: the event loop's time may be that of the start of its turn, and is in whole milliseconds.


class Pump:
    """`apply` takes an event through the core and says whether a plan came of it. `scheduler` is only asked; `clock` is its time.

    While `planning` is False nothing is asked for.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drives: Mapping[str, Drive],
        writer: RecordWriter,
        clock: Callable[[], float],
        apply: Callable[[Event], bool],
    ) -> None:
        self.planning = True
        self._scheduler = scheduler
        self._drives = drives
        self._writer = writer
        self._clock = clock
        self._apply = apply
        self._handle: asyncio.Handle | None = None
        self._is_soon = False
        self._was_saturated = False

    def soon(self) -> None:
        """Asks for plans once the events of this turn of the event loop are all in."""
        if not self._is_soon:
            self._set_handle(asyncio.get_running_loop().call_soon(self.run))
            self._is_soon = True

    def committed(self) -> None:
        """The writer's backlog is shorter now; asks for plans if that was what they waited for."""
        if self._was_saturated:
            self.soon()

    def run(self) -> None:
        """Asks the core for every plan that is due, and comes back when the next one will be, or when time alone matters."""
        self._set_handle(None)
        if not self.planning:
            return
        times_s = []
        self._was_saturated = self._writer.saturated
        if not self._was_saturated:
            times_s = [due_s for drive in self._drives.values() if (due_s := self._plan(drive)) is not None]
        wait_s = self._until_wakeup()
        if wait_s is not None and wait_s <= 0:
            # No plan was asked for, which sees to the same.
            self._apply(Tick())
            wait_s = self._until_wakeup()
        if wait_s is not None:
            times_s.append(monotonic() + max(wait_s, MIN_WAKEUP_S))
        if times_s:
            self._set_handle(asyncio.get_running_loop().call_later(min(times_s) - monotonic(), self.run))

    def _plan(self, drive: Drive) -> float | None:
        """Issues what is due at this executor; returns when to ask again, None if only an event can change that."""
        while drive.connected and (due_s := drive.pacer.due_s(now_s := monotonic())) is not None:
            if due_s > now_s + TIMER_TICK_S:
                return due_s
            if not self._apply(PlanDue(drive.name, drive.pacer.most_steps())):
                drive.pacer.declined()
                return None
        return None

    def _until_wakeup(self) -> float | None:
        wakeup_s = self._scheduler.next_wakeup_s()
        return None if wakeup_s is None else wakeup_s - self._clock()

    def _set_handle(self, handle: asyncio.Handle | None) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = handle
        self._is_soon = False
