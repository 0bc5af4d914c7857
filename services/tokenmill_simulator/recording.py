"""A service's recorded events as a load, as machines, and as what came of it: for what another policy would have done.

What executors answered cannot be replayed under other plans, so their steps are: a cost is fitted to the times of their results.
How long the output of a request is, is known of those that were done; others are taken to go on to their max_tokens, and are
cancelled when they were, when they failed, or where the recording ends. Must not know: files, the codec.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill_scheduler.core.counters import Counters
from tokenmill_scheduler.core.effects import Effect, PlanIssued, TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import (
    Event,
    ExecutorJoined,
    Expired,
    HandedOver,
    PolicyChanged,
    QuotasChanged,
    ResultArrived,
    Submitted,
    WeightsChanged,
)
from tokenmill_scheduler.core.plans import ExecutorDescription, Result
from tokenmill_scheduler.core.request import TERMINAL, Request, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_workloads import Arrival

from tokenmill_simulator.compare import Machines, Run
from tokenmill_simulator.cost import StepLoad
from tokenmill_simulator.figures import Target, summarise
from tokenmill_simulator.fit import Fit, fit
from tokenmill_simulator.measures import Measures
from tokenmill_simulator.recorded_steps import RecordedSteps, service_cost
from tokenmill_simulator.requests import SimulatedRequest
from tokenmill_simulator.simulation import Step


@dataclass(slots=True)
class _Asked:
    """A request as it was recorded. `before`: tokens that an earlier process had made of it. `ended`: how, None if it did not.

    `left_s`: when it was cancelled from outside, failed, or went to another scheduler.
    """

    request: Request
    before: tuple[int, ...]
    at_s: float
    made: int = 0
    ended: State | None = None
    left_s: float | None = None


class Recording:
    """`saw` takes every event of one process of a scheduler, in order, with what it led to."""

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}
        self._descriptions: dict[str, ExecutorDescription] = {}
        self._steps: dict[tuple[str, int], RecordedSteps] = {}
        self._policy: PolicyChanged | None = None
        self._rules: dict[str, Event] = {}
        self._effects: list[tuple[float, list[Effect]]] = []
        self._rows: list[Step] = []
        self._last_s = 0.0

    def saw(self, at_s: float, event: Event, effects: list[Effect], waiting: int) -> None:
        """`waiting` requests are queued now."""
        self._last_s = at_s
        match event:
            case Submitted():
                for request in (event.request, *event.choices):
                    self._asked.setdefault(request.request_id, _Asked(request, event.output, at_s))
            case ExecutorJoined():
                self._descriptions.setdefault(event.executor.name, event.executor)
                self._steps[event.executor.name, event.epoch] = RecordedSteps()
            case PolicyChanged():
                self._policy = event
            case QuotasChanged() | WeightsChanged():
                self._rules[type(event).__name__] = event
            case HandedOver():
                for request_id in event.request_ids:
                    self._asked[request_id].left_s = at_s
            case ResultArrived():
                self._answered(event.executor, event.result, at_s, waiting)
        for effect in effects:
            if isinstance(effect, PlanIssued):
                self._steps[effect.executor, effect.plan.epoch].issued(effect.plan, at_s)
            elif isinstance(effect, TokensGenerated):
                for request_id, count in zip(effect.request_ids, effect.counts, strict=True):
                    self._asked[request_id].made += count
            elif isinstance(effect, Transitioned) and effect.after in TERMINAL:
                self._ended(self._asked[effect.request_id], effect.after, at_s, timed_out=isinstance(event, Expired))
        told: list[Effect] = [effect for effect in effects if isinstance(effect, TokensGenerated | Transitioned)]
        if told:
            self._effects.append((at_s, told))

    def _ended(self, asked: _Asked, state: State, at_s: float, *, timed_out: bool) -> None:
        """`timed_out`: by a limit of the service's, which the core does not know."""
        asked.ended = state
        if timed_out or state in (State.CANCELLED, State.FAILED):
            asked.left_s = at_s

    def _answered(self, executor: str, result: Result, at_s: float, waiting: int) -> None:
        steps = self._steps.get((executor, result.epoch))
        step_s = steps.answered(result, at_s) if steps is not None else None
        if step_s is None:
            return
        index, sequences = list(self._descriptions).index(executor), len(result.sequence_ids)
        for number in reversed(range(result.num_steps)):
            end_s = at_s - step_s * number
            self._rows.append(Step(index, end_s - step_s, end_s, sequences, result.blocks, waiting))

    # ---- what came of it -------------------------------------------------------------------------------------------------------

    @property
    def _start_s(self) -> float:
        return min(asked.at_s for asked in self._asked.values())

    def requests(self) -> list[SimulatedRequest]:
        """In the order of their arrival. Raises ValueError when there are none."""
        if not self._asked:
            raise ValueError("no request was recorded")
        return [_simulated(asked, asked.at_s - self._start_s, self._last_s) for asked in self._asked.values()]

    def config(self, base: SchedulerConfig) -> SchedulerConfig:
        """`base`, with the order of queues that was last in force."""
        last = self._policy
        if last is None:
            return base
        return replace(base, policy=last.policy, fair_share=last.fair_share, lane_shares=last.lane_shares)

    def rules(self) -> list[Event]:
        """Quotas and weights of tenants that were last in force."""
        return list(self._rules.values())

    @property
    def measured_steps(self) -> tuple[list[StepLoad], list[float]]:
        """Those whose time is known: what each had to do, and the seconds it took."""
        steps = self._steps.values()
        return [load for each in steps for load in each.loads], [seconds for each in steps for seconds in each.seconds]

    def fit(self) -> Fit:
        """Raises ValueError when no result said how long it took."""
        return fit(*self.measured_steps)

    def machines(self) -> Machines:
        """As many executors as there were names, all like the first. Raises ValueError when there were none."""
        if not self._descriptions:
            raise ValueError("no executor was recorded")
        first = next(iter(self._descriptions.values()))
        caches = first.caches_prefixes and first.cache_version is not None
        service = service_cost(self._steps.values())
        return Machines(self.fit().cost, replace(first, caches_prefixes=caches), len(self._descriptions), service)

    def measures(self) -> Measures:
        """As the core saw it. Raises ValueError when there are no requests."""
        measures = Measures(self.requests(), list(self._asked))
        for at_s, effects in self._effects:
            measures.happened(effects, at_s - self._start_s)
        measures.steps = [replace(row, start_s=row.start_s - self._start_s, end_s=row.end_s - self._start_s) for row in self._rows]
        return measures

    def run(self, config: SchedulerConfig, counters: Counters, target: Target) -> Run:
        """What was measured, in the same figures as a simulation's. `counters` are the recorded core's."""
        measures = self.measures()
        figures = summarise(measures, counters, config.max_num_seqs, len(self._descriptions), target)
        return Run("recorded", config, figures, measures)


def _simulated(asked: _Asked, at_s: float, last_s: float) -> SimulatedRequest:
    request = asked.request
    prompt = (*request.prompt, *asked.before)
    most = max(1, request.sampling.max_tokens - len(asked.before), asked.made)
    left_s = last_s if asked.ended is None and asked.left_s is None else asked.left_s
    deadline_s, queue_deadline_s, leaves_s = (
        None if time_s is None else time_s - asked.at_s for time_s in (request.deadline_s, request.queue_deadline_s, left_s)
    )
    return SimulatedRequest(
        Arrival(at_s, len(prompt), max(1, asked.made) if asked.ended is State.DONE else most),
        prompt,
        request.priority,
        request.lane,
        request.tenant,
        deadline_s,
        most,
        queue_deadline_s,
        leaves_s,
    )
