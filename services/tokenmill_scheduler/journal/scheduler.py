"""The core with its journal: whatever goes in and comes out is handed to the writer. Must not know: files."""

from __future__ import annotations

from typing import Protocol

from tokenmill_scheduler.core.effects import Effect
from tokenmill_scheduler.core.events import Event
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenmill_scheduler.journal.lines import Outcome


class Journal(Protocol):
    def happened(self, now_s: float, event: Event, outcome: Outcome) -> None:
        """Returns at once."""


class JournaledScheduler(Scheduler):
    def __init__(self, config: SchedulerConfig, journal: Journal) -> None:
        super().__init__(config)
        self._journal = journal

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        try:
            effects = super().handle(event, now_s)
        except Exception as error:
            # The last entry, and the one that is looked for.
            self._journal.happened(now_s, event, error)
            raise
        self._journal.happened(now_s, event, effects)
        return effects
