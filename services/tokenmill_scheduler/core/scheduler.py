"""The pure scheduler: events in, effects out. No I/O, clock, randomness, logging, protobuf or SQL.

`Scheduler.handle` is the whole of it; `Questions` is what may be asked. Requests and executors live in the `Roster`; `Membership`
says which executors there are; `Planner` makes plans, asking `Room` who fits; `apply_result` reads results. Same events, same
effects, in the same order: nothing iterates over a set or draws a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tokenmill_scheduler.core import quarantine
from tokenmill_scheduler.core.admission import admission_named
from tokenmill_scheduler.core.admitter import Admitter
from tokenmill_scheduler.core.batching import batching_named
from tokenmill_scheduler.core.coming import LEAST_SHARED
from tokenmill_scheduler.core.displacement import Displacement
from tokenmill_scheduler.core.effects import Effect, PlanIssued
from tokenmill_scheduler.core.events import (
    Cancelled,
    Event,
    ExecutorDrained,
    ExecutorGone,
    ExecutorJoined,
    ExecutorLost,
    ExecutorsAwaited,
    ExecutorsKnown,
    ExecutorUndrained,
    Expired,
    HandedOver,
    PlanDue,
    PolicyChanged,
    QueuePaused,
    QueueResumed,
    QuotasChanged,
    ResultArrived,
    Submitted,
    Tick,
    Updated,
    WeightsChanged,
)
from tokenmill_scheduler.core.lanes import DEFAULT_LANE_SHARES, LaneShares
from tokenmill_scheduler.core.lengths import OutputLengths
from tokenmill_scheduler.core.live import Ending
from tokenmill_scheduler.core.membership import Membership
from tokenmill_scheduler.core.ordering import AGEING_TURN, MAX_PRIORITY_WAIT_S, Ordering
from tokenmill_scheduler.core.overload import OverloadConfig
from tokenmill_scheduler.core.planner import Planner
from tokenmill_scheduler.core.policy import policy_named
from tokenmill_scheduler.core.prediction import Prediction
from tokenmill_scheduler.core.questions import Questions
from tokenmill_scheduler.core.request import QUEUED, RUNNING, FinishReason, State
from tokenmill_scheduler.core.results import apply_result
from tokenmill_scheduler.core.room import Room
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.warden import Warden

_EXPIRED = Ending(State.EXPIRED, FinishReason.EXPIRED, "deadline passed")
_EXPIRED_IN_QUEUE = Ending(State.EXPIRED, FinishReason.EXPIRED, "waited in the queue as long as its queue timeout allows")
# What lets a queue run, or stops it.
_OPENING = (ExecutorJoined, ExecutorLost, ExecutorGone, ExecutorDrained, ExecutorUndrained, QueuePaused, QueueResumed)
_AT_MAX_TOKENS = Ending(State.DONE, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and choices, validated by the settings. The executor's own limits apply where they are lower."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    batching: str = "continuous"
    policy: str = "fcfs"
    # static batching: start a batch that is not full once its oldest request has waited this long
    max_waiting_time_s: float = 0.05
    # share of an executor's blocks kept back from admissions, for sequences already running
    watermark: float = 0.01
    # how often, in all, later equals may be admitted past a waiting request that does not fit
    max_overtakes: int = 8
    # every so many admissions of a line, one is of the request that arrived first; 0: never (see `ordering.py`)
    ageing_turn: int = AGEING_TURN
    # how many executors a request may cost, tried alone after the first, before it fails; at least 2
    max_executor_losses: int = 2
    # how often in a row, with no token between, executors may have no block for a request that they had reported blocks for
    max_no_blocks: int = 16
    # under `priority`, how long the order is strict before a request ages
    max_priority_wait_s: float = MAX_PRIORITY_WAIT_S
    # slots that each lane is guaranteed, in per cent, in the order of `Lane`
    lane_shares: LaneShares = DEFAULT_LANE_SHARES
    # whether the tenants of a lane share it by their weights; those not named have weight 1
    fair_share: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    # for how many of a request's tokens blocks are booked when it is admitted
    admission: str = "optimistic"
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    # of a request's first tokens, so many that a running sequence is about to compute are waited for (see `coming.py`)
    least_shared: int = LEAST_SHARED


class Scheduler(Questions):
    """Owned by one loop. Raises KeyError for an unknown policy, batching mode or mode of admission."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        batching = batching_named(config.batching, config.max_waiting_time_s)
        prediction = Prediction(OutputLengths())
        roster = Roster(_ordering(config, prediction), prediction)
        room = Room(roster, admission_named(config.admission, prediction.lengths), config.watermark)
        super().__init__(roster, batching, room, Warden(roster, config.overload))
        self._membership = Membership(roster, config.max_num_seqs, config.max_num_batched_tokens, config.max_executor_losses)
        admitter = Admitter(roster, room, self._warden, config.max_overtakes, config.least_shared)
        self._planner = Planner(roster, batching, room, admitter, Displacement(roster, batching, room, admitter))

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Applies one event at time `now_s` (Unix seconds, never going back); the effects are in the order to be carried out."""
        self._roster.now_s = now_s
        match event:
            case ResultArrived():
                self._result_arrived(event, now_s)
            case PlanDue():
                self._plan_due(event, now_s)
            case Submitted():
                self._submitted(event, now_s)
            case Cancelled():
                self._cancelled(event, now_s)
            case Expired():
                self._time_limit_passed(event, now_s)
            case Updated():
                self._updated(event)
            case ExecutorJoined():
                self._membership.joined(event, now_s)
            case ExecutorLost():
                self._membership.lost(event, now_s)
            case ExecutorDrained():
                self._membership.drained(event, now_s)
            case ExecutorUndrained():
                self._membership.undrained(event)
            case ExecutorsAwaited():
                self._membership.awaited(event, now_s)
            case ExecutorGone():
                self._membership.gone(event)
            case ExecutorsKnown():
                self._membership.known(event)
            case HandedOver():
                for request_id in event.request_ids:
                    self._roster.give_away(self._roster.requests[request_id], now_s)
            case QueuePaused():
                self._roster.paused = event.why
            case QueueResumed():
                self._roster.paused = ""
            case PolicyChanged():
                self._policy_changed(event)
            case WeightsChanged():
                self._roster.reorder(replace(self._roster.ordering, weights=event.weights))
            case QuotasChanged():
                self._roster.quotas.change(event.default, event.tenants, now_s)
            case Tick():
                self._expire(now_s)
                self._warden.look(now_s)
        if isinstance(event, _OPENING):
            self._warden.opened(now_s)
        effects, self._roster.effects = self._roster.effects, []
        return effects

    def _submitted(self, event: Submitted, now_s: float) -> None:
        """One that is known already is not taken in twice."""
        if event.request.request_id in self._roster.requests:
            return
        live = self._roster.enter(event)
        quarantine.suspect_still(live, event.losses)
        for executor in self._roster.executors.values():
            if executor.joined and executor.description.model == event.request.model:
                for choice in live.gang or (live,):
                    executor.mirror.prepare(choice)
        if event.state in QUEUED:
            self._roster.enqueue(live)
        if live.at_max_tokens:
            self._roster.end(live, _AT_MAX_TOKENS, now_s)
        elif event.state in RUNNING:
            self._roster.recover(live, now_s, "scheduler restarted", event.executor)

    def _cancelled(self, event: Cancelled, now_s: float) -> None:
        """One that is unknown has ended: nothing changes."""
        live = self._roster.requests.get(event.request_id)
        if live is not None:
            self._roster.end(live, Ending(State.CANCELLED, FinishReason.CANCELLED, event.reason), now_s)

    def _time_limit_passed(self, event: Expired, now_s: float) -> None:
        live = self._roster.requests.get(event.request_id)
        if live is not None:
            self._roster.end(live, Ending(State.EXPIRED, FinishReason.EXPIRED, event.reason), now_s)

    def _updated(self, event: Updated) -> None:
        live = self._roster.requests.get(event.request_id)
        if live is None:
            return
        queue = self._roster.queue(live.request.model) if live.state in QUEUED else None
        if queue is not None:
            queue.remove(live.entry)
        live.update(event.priority, event.deadline_s)
        if queue is not None:
            queue.add(live.entry)
        self._roster.watch_deadline(live)
        self._roster.effects.append(event)

    def _policy_changed(self, event: PolicyChanged) -> None:
        policy = policy_named(event.policy, self._roster.prediction.remaining)
        ordering = self._roster.ordering
        self._roster.reorder(replace(ordering, policy=policy, fair_share=event.fair_share, lane_shares=event.lane_shares))

    def _result_arrived(self, event: ResultArrived, now_s: float) -> None:
        executor = self._roster.executors.get(event.executor)
        if executor is None:
            self._roster.counters.stale_results += 1
            return
        apply_result(self._roster, executor, event.result, event.text_stops, self.config.max_no_blocks, now_s)

    def _plan_due(self, event: PlanDue, now_s: float) -> None:
        self._expire(now_s)
        self._warden.look(now_s)
        executor = self._roster.executors.get(event.executor)
        if executor is None or not executor.has_plan_room:
            return
        executor.asked_s = now_s
        self._roster.quotas.refilled(now_s)
        plan = self._planner.plan(executor, now_s, event.max_steps)
        if plan is not None:
            self._roster.effects.append(PlanIssued(executor.name, plan, executor.plans_out[-1].reaches_end))

    def _expire(self, now_s: float) -> None:
        while (earliest := self._roster.deadlines.earliest()) and earliest[0] <= now_s:
            live = self._roster.requests[earliest[1]]
            deadline_s = live.request.deadline_s
            in_queue = deadline_s is None or deadline_s > earliest[0]
            self._roster.end(live, _EXPIRED_IN_QUEUE if in_queue else _EXPIRED, now_s)


def _ordering(config: SchedulerConfig, prediction: Prediction) -> Ordering:
    return Ordering(
        policy_named(config.policy, prediction.remaining),
        prediction.remaining,
        config.lane_shares,
        config.fair_share,
        config.weights,
        config.ageing_turn,
        config.max_priority_wait_s,
    )
