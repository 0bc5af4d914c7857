"""A plan in the making. Must not know: why a sequence is in it, where it is sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill_scheduler.core import forks
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.plans import Admission
from tokenmill_scheduler.core.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """`budget` is what is left of its tokens, `only_decodes` that it has no part of a prompt."""

    budget: int
    only_decodes: bool = True
    steps: int = 1
    admissions: list[Admission] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def advance(self, sequence: Sequence, count: int) -> None:
        self.budget -= count
        self.sequences.append(sequence)
        self.counts.append(count)
        sequence.plan(count)

    def prefill(self, sequence: Sequence, executor: ExecutorState) -> None:
        """As far as budget and blocks go; the executor hears of it now, if it has not."""
        # Blocks booked for all that is known cover it, but for what windows leave behind: that has to come back first.
        if sequence.planned_computed >= sequence.covered:
            return
        self.only_decodes = False
        if sequence.admission is not None:
            self.admissions.append(forks.introduction(sequence, executor))
        self.advance(sequence, min(sequence.remaining, self.budget, sequence.covered - sequence.planned_computed))
