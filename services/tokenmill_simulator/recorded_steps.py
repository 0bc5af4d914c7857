"""The steps of one executor as a plan journal has them: what each had to do and how long it took, and how early plans came.

Must not know: requests, files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
from tokenmill_scheduler.core.plans import Plan, Result

from tokenmill_simulator.cost import UNMEASURED, ServiceCost, StepLoad
from tokenmill_simulator.executor import Ints, has_prefill, step_load


@dataclass(frozen=True, slots=True)
class _PlanOut:
    """`behind`: another one was out when it was issued."""

    plan: Plan
    issued_s: float
    behind: bool


@dataclass(frozen=True, slots=True)
class _Done:
    """The last plan that was answered. `cut`: it was to have more steps."""

    step_s: float
    prefills: bool
    cut: bool


_NOTHING_DONE = _Done(0.0, prefills=False, cut=False)


@dataclass(slots=True)
class RecordedSteps:
    """Of one epoch.

    - loads, seconds: the steps whose time is known.
    - waits_s: how long each plan that came behind one that only decodes waited for its end. A plan that cuts another short came for
      that reason, and is none of them. decode_steps: all steps that only decode.
    - waits_prefill: of those behind one that computes a prompt, as a share of its step.
    - links_s: of each plan and its result, both ways together.
    """

    loads: list[StepLoad] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    decode_steps: int = 0
    waits_prefill: list[float] = field(default_factory=list)
    links_s: list[float] = field(default_factory=list)
    _out: dict[int, _PlanOut] = field(default_factory=dict)
    _computed: dict[int, int] = field(default_factory=dict)
    _ahead: _Done = _NOTHING_DONE

    def issued(self, plan: Plan, at_s: float) -> None:
        self._out[plan.plan_id] = _PlanOut(plan, at_s, bool(self._out))

    def answered(self, result: Result, at_s: float) -> float | None:
        """The seconds that each of its steps took, for they are taken to have been alike; None if it answers no plan."""
        out = self._out.pop(result.plan_id, None)
        if out is None:
            return None
        wait_s = result.times.queue_us / 1e6
        if out.behind:
            self._waited(wait_s)
        if result.times.steps_s:
            self.links_s.append(max(0.0, at_s - out.issued_s - wait_s - result.times.steps_s))
        starts, computed = self._rows(result)
        for sequence_id in out.plan.release:
            self._computed.pop(sequence_id, None)
        step_s = result.times.steps_s / result.num_steps
        prefills = has_prefill(out.plan)
        self._ahead = _Done(step_s, prefills, cut=result.num_steps < out.plan.max_steps)
        self.decode_steps += 0 if prefills else result.num_steps
        for number in range(result.num_steps if step_s and len(computed) else 0):
            # A plan of several steps computes a token in each, of those that have not ended.
            counts = computed if result.num_steps == 1 else (computed > number).astype(np.int64)
            self.loads.append(step_load(starts + number, counts))
            self.seconds.append(step_s)
        return step_s

    def _waited(self, wait_s: float) -> None:
        if self._ahead.prefills and self._ahead.step_s:
            self.waits_prefill.append(wait_s / self._ahead.step_s)
        elif not self._ahead.cut:
            self.waits_s.append(wait_s)

    def _rows(self, result: Result) -> tuple[Ints, Ints]:
        """Of each sequence the tokens that were computed before, and those that the plan computed."""
        starts = []
        cached = result.num_cached or (0,) * len(result.sequence_ids)
        for sequence_id, computed, found in zip(result.sequence_ids, result.num_computed, cached, strict=True):
            start = self._computed.get(sequence_id, 0) + found
            starts.append(start)
            self._computed[sequence_id] = start + computed
        return np.array(starts, dtype=np.int64), np.array(result.num_computed, dtype=np.int64)


def service_cost(recorded: Iterable[RecordedSteps]) -> ServiceCost:
    """The link, and how long before a step's end the next plan was asked for; UNMEASURED's where no result says how long it took.

    Medians, for a few plans come far too early. One lead for a plan of several steps is so much less for each of them.
    """
    every = list(recorded)
    waits_s = [wait_s for steps in every for wait_s in steps.waits_s]
    shares = [share for steps in every for share in steps.waits_prefill]
    links_s = [link_s for steps in every for link_s in steps.links_s]
    cost = UNMEASURED
    if links_s:
        cost = replace(cost, link_s=median(links_s) / 2)
    if any(waits_s):
        each_s = median(waits_s) * len(waits_s) / sum(steps.decode_steps for steps in every)
        cost = replace(cost, lead_s=each_s + cost.link_s)
    if shares:
        cost = replace(cost, prefill_lead=median(shares))
    return cost
