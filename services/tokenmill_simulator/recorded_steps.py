"""The steps of one executor as a plan journal has them: what each had to do and how long it took, and how early plans came.

Must not know: requests, files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from tokenmill_scheduler.core.records import Plan, Result

from tokenmill_simulator.cost import UNMEASURED, StepLoad
from tokenmill_simulator.executor import Ints, step_load
from tokenmill_simulator.simulation import LINK_S


@dataclass(frozen=True, slots=True)
class _PlanOut:
    """`behind`: another one was out when it was issued."""

    plan: Plan
    behind: bool


@dataclass(slots=True)
class RecordedSteps:
    """Of one epoch.

    - loads, seconds: the steps whose time is known.
    - waits_s: how long each plan that came while another was in progress waited for its end; waits_steps: the steps of those plans.
      A plan that cuts another short came for that reason, and is none of them.
    """

    loads: list[StepLoad] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    waits_steps: int = 0
    _out: dict[int, _PlanOut] = field(default_factory=dict)
    _computed: dict[int, int] = field(default_factory=dict)
    _cut_short: bool = False

    def issued(self, plan: Plan) -> None:
        self._out[plan.plan_id] = _PlanOut(plan, bool(self._out))

    def answered(self, result: Result) -> float | None:
        """The seconds that each of its steps took, for they are taken to have been alike; None if it answers no plan."""
        out = self._out.pop(result.plan_id, None)
        if out is None:
            return None
        if out.behind and not self._cut_short:
            self.waits_s.append(result.times.queue_us / 1e6)
            self.waits_steps += result.num_steps
        self._cut_short = result.num_steps < out.plan.max_steps
        starts, computed = self._rows(result)
        for sequence_id in out.plan.release:
            self._computed.pop(sequence_id, None)
        step_s = result.times.steps_s / result.num_steps
        for number in range(result.num_steps if step_s and len(computed) else 0):
            # A plan of several steps computes a token in each, of those that have not ended.
            counts = computed if result.num_steps == 1 else (computed > number).astype(np.int64)
            self.loads.append(step_load(starts + number, counts))
            self.seconds.append(step_s)
        return step_s

    def _rows(self, result: Result) -> tuple[Ints, Ints]:
        """Of each sequence the tokens that were computed before, and those that the plan computed."""
        starts = []
        cached = result.num_cached or (0,) * len(result.sequence_ids)
        for sequence_id, computed, found in zip(result.sequence_ids, result.num_computed, cached, strict=True):
            start = self._computed.get(sequence_id, 0) + found
            starts.append(start)
            self._computed[sequence_id] = start + computed
        return np.array(starts, dtype=np.int64), np.array(result.num_computed, dtype=np.int64)


def lead_s(recorded: Iterable[RecordedSteps]) -> float:
    """How long before a step's end the next plan was asked for; UNMEASURED's if no result says how long it waited.

    The median of the plans: a few come far too early, ahead of a chunk that takes longer than those before it. One lead for a plan
    of several steps is so much less for each of them.
    """
    every = list(recorded)
    waits_s = [wait_s for steps in every for wait_s in steps.waits_s]
    if not any(waits_s):
        return UNMEASURED.lead_s
    return median(waits_s) * len(waits_s) / sum(steps.waits_steps for steps in every) + LINK_S
