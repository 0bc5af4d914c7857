"""The pure scheduler: events in, effects out. No I/O, clock, randomness, logging, protobuf or SQL.

`Scheduler.handle` is the whole of it. Requests and executors live in the `Roster`; `Planner` makes plans, asking `Room` who fits;
`apply_result` reads results. Same events, same effects, in the same order: nothing here iterates over a set or draws a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tokenmill_scheduler.core import quarantine
from tokenmill_scheduler.core.admission import admission_named
from tokenmill_scheduler.core.batching import batching_named
from tokenmill_scheduler.core.counters import Counters, ExecutorView
from tokenmill_scheduler.core.drain import Drain
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.lanes import DEFAULT_LANE_SHARES, LaneShares
from tokenmill_scheduler.core.lengths import OutputLengths
from tokenmill_scheduler.core.live import Ending
from tokenmill_scheduler.core.ordering import AGEING_TURN, MAX_PRIORITY_WAIT_S, Ordering
from tokenmill_scheduler.core.overload import OverloadConfig, Stage
from tokenmill_scheduler.core.planner import Planner
from tokenmill_scheduler.core.policy import policy_named
from tokenmill_scheduler.core.prediction import Prediction
from tokenmill_scheduler.core.records import (
    Blocks,
    Cancelled,
    Effect,
    Event,
    ExecutorDescription,
    ExecutorDrained,
    ExecutorGone,
    ExecutorJoined,
    ExecutorLost,
    ExecutorsAwaited,
    ExecutorsKnown,
    ExecutorUndrained,
    Expired,
    HandedOver,
    KnownExecutor,
    PlanDue,
    PlanIssued,
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
from tokenmill_scheduler.core.request import QUEUED, RUNNING, FinishReason, Lane, Request, State
from tokenmill_scheduler.core.results import apply_result
from tokenmill_scheduler.core.room import Room
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.strays import Strays
from tokenmill_scheduler.core.waiting import WaitReason, WaitReasons
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


class Scheduler:
    """Owned by one loop. Raises KeyError for an unknown policy, batching mode or mode of admission."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._batching = batching_named(config.batching, config.max_waiting_time_s)
        prediction = Prediction(OutputLengths())
        self._roster = Roster(_ordering(config, prediction), prediction)
        self._warden = Warden(self._roster, config.overload)
        admission = admission_named(config.admission, prediction.lengths)
        self._room = Room(self._roster, admission, config.watermark)
        self._strays = Strays(self._roster, self._room)
        self._reasons = WaitReasons(self._roster, self._batching, self._room, self._warden)
        self._planner = Planner(self._roster, self._batching, self._room, self._warden, config.max_overtakes)

    # ---- events ----

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
                self._executor_joined(event, now_s)
            case ExecutorLost():
                self._executor_lost(event, now_s)
            case ExecutorDrained():
                self._executor_drained(event, now_s)
            case ExecutorUndrained():
                self._roster.drained.pop(event.executor, None)
            case ExecutorsAwaited():
                self._executors_awaited(event, now_s)
            case ExecutorGone():
                self._executor_gone(event)
            case ExecutorsKnown():
                self._roster.known = {other.description.name: self._known(other) for other in event.executors}
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
            self._roster.recover(live, now_s, "scheduler restarted")

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

    def _executor_joined(self, event: ExecutorJoined, now_s: float) -> None:
        """A higher epoch ends the lower one; a lower is late news."""
        description = event.executor
        known = self._roster.executors.get(description.name)
        if known is not None:
            if event.epoch <= known.epoch:
                return
            if event.epoch_seen >= known.epoch:
                self._roster.lose(known, now_s, "executor joined anew")
                quarantine.survived(self._roster, known.name, known.epoch)
            else:
                self._lose(known, now_s, "executor joined anew")
        executor = self._executor(description, event.blocks, event.epoch)
        executor.mirror.apply((), event.stored)
        self._roster.executors[description.name] = executor

    def _executor(self, description: ExecutorDescription, blocks: Blocks, epoch: int = 0) -> ExecutorState:
        tokens = min(self.config.max_num_batched_tokens, description.max_num_batched_tokens)
        # Every decode is in every plan, so a step has to have a token for each slot.
        seqs = min(self.config.max_num_seqs, description.max_num_seqs, tokens)
        return ExecutorState(description, epoch, blocks, seqs, tokens)

    def _executor_lost(self, event: ExecutorLost, now_s: float) -> None:
        executor = self._roster.executors.get(event.executor)
        if executor is not None and executor.joined and executor.epoch == event.epoch:
            reason = f"executor lost: {event.reason}"
            if event.lives:
                self._roster.lose(executor, now_s, reason)
            else:
                self._lose(executor, now_s, reason)

    def _lose(self, executor: ExecutorState, now_s: float, reason: str) -> None:
        """Of what it may have died of, nobody knows."""
        quarantine.lose(self._roster, executor, now_s, reason, self.config.max_executor_losses)

    def _executor_drained(self, event: ExecutorDrained, now_s: float) -> None:
        """Remembered for executors that are not there, too."""
        self._roster.drained[event.executor] = event.why
        executor = self._roster.executors.get(event.executor)
        if executor is not None:
            self._roster.drain(executor, now_s, f"executor drained {event.why}")

    def _executors_awaited(self, event: ExecutorsAwaited, now_s: float) -> None:
        if not set(event.addresses) <= set(self._roster.awaited):
            self._roster.awaited_s = now_s
        self._roster.awaited = event.addresses

    def _executor_gone(self, event: ExecutorGone) -> None:
        self._roster.executors.pop(event.executor.name, None)
        self._roster.known[event.executor.name] = self._known(KnownExecutor(event.executor, elsewhere=True))

    def _known(self, executor: KnownExecutor) -> ExecutorState:
        state = self._executor(executor.description, Blocks(0, 0, 0))
        state.joined = executor.elsewhere
        return state

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
            self._roster.effects.append(PlanIssued(executor.name, plan))

    def _expire(self, now_s: float) -> None:
        while (earliest := self._roster.deadlines.earliest()) and earliest[0] <= now_s:
            live = self._roster.requests[earliest[1]]
            deadline_s = live.request.deadline_s
            in_queue = deadline_s is None or deadline_s > earliest[0]
            self._roster.end(live, _EXPIRED_IN_QUEUE if in_queue else _EXPIRED, now_s)

    # ---- questions; none changes anything ----

    def owner(self, executor: str, sequence_id: int) -> str | None:
        """The request whose tokens a result for this sequence would be kept for; None if it would be dropped as stale."""
        known = self._roster.executors.get(executor)
        sequence = known.sequence(sequence_id) if known is not None else None
        return sequence.live.request_id if sequence is not None and sequence.live is not None else None

    def strays(self, patience_s: float) -> dict[str, tuple[str, ...]]:
        """Waiting requests that executors of other schedulers can run and none here can, by executor (see `strays.py`)."""
        return self._strays.find(patience_s)

    def losses(self, request_id: str) -> int:
        """How many executors a request here is suspected to have cost."""
        return len(self._roster.requests[request_id].lost_with)

    def next_wakeup_s(self) -> float | None:
        """When to hand in a Tick, and ask for plans, although nothing has happened: a deadline, the start of a static batch, a
        tenant that may use tokens again, or a look at the overload.

        Unix seconds; may have passed already. None: only an event can change anything.
        """
        times = [
            due_s
            for executor in self._roster.executors.values()
            if executor.has_plan_room
            for due_s in self._chances_s(executor)
            if due_s > executor.asked_s
        ]
        earliest = self._roster.deadlines.earliest()
        times += [earliest[0]] if earliest else []
        next_look_s = self._warden.next_look_s()
        return min(times if next_look_s is None else [*times, next_look_s], default=None)

    def _chances_s(self, executor: ExecutorState) -> list[float]:
        """When an executor with room for a plan may admit somebody whom it did not admit before."""
        batch_s = self._batching.wakeup_s(executor, self._roster.queue(executor.description.model))
        refill_s = self._roster.quotas.next_refill_s
        return [due_s for due_s in (batch_s, refill_s) if due_s is not None]

    def max_num_seqs(self, executor: str) -> int:
        """Most sequences in a step of an executor that has joined."""
        return self._roster.executors[executor].max_num_seqs

    def most_choices(self, model: str, num_prompt_tokens: int, max_tokens: int) -> int | None:
        """Of a prompt of so many tokens, the most that can ever run at once; None while no executor of the model is known."""
        return self._room.most_choices(model, num_prompt_tokens, max_tokens)

    def wait_reason(self, request_id: str) -> str:
        """Why a request waits, in a few words; empty if it does not wait or is unknown."""
        why = self.why_waits(request_id)
        return "" if why is None else why.words

    def why_waits(self, request_id: str) -> WaitReason | None:
        """None if it does not wait or is unknown."""
        live = self._roster.requests.get(request_id)
        return None if live is None or live.state not in QUEUED else self._reasons.of(live)

    def wait_reasons(self) -> dict[str, int]:
        """Waiting requests by why they wait; of a long queue the first are looked at (see `waiting.py`)."""
        return self._reasons.counts()

    @property
    def ordering(self) -> Ordering:
        return self._roster.ordering

    def never_within_quota(self, request: Request) -> str:
        """Which quota a request exceeds by itself, with all its choices, and what to do, in a few words; empty: none."""
        quota, tenant = self._roster.quotas.of(request.tenant), request.tenant
        if quota.max_num_seqs is not None and request.best_of > quota.max_num_seqs:
            words = (
                f"the request has {request.best_of} choices, and tenant {tenant} may have {quota.max_num_seqs} sequences running"
            )
            return f"{words}: ask for fewer"
        blocks = self._room.least_blocks(request)
        if quota.max_kv_blocks is not None and blocks > quota.max_kv_blocks:
            words = f"the request may come to {blocks} KV blocks, more than the {quota.max_kv_blocks} that tenant {tenant} may hold"
            return f"{words}: ask for a lower max_tokens"
        return ""

    def over_quota(self, request: Request, now_s: float) -> str:
        """Which quota would make a request wait that came now, in a few words; empty: none."""
        queued = self._roster.backlog.num_waiting(request.tenant)
        blocks = self._room.least_blocks(request)
        return self._roster.quotas.over(request.tenant, queued + request.best_of, blocks, now_s)

    def tokens_ready_s(self, tenant: str, now_s: float) -> float:
        """When its quota of tokens per second lets the tenant's requests run; `now_s` if it does, infinity if it never will."""
        return self._roster.quotas.ready_s(tenant, now_s)

    @property
    def overload_stage(self) -> Stage:
        return self._warden.stage

    @property
    def overload_why(self) -> str:
        """Empty while nothing is held back."""
        return self._warden.why

    @property
    def num_queued_tokens(self) -> int:
        """The most that all queued requests may come to, prompts and output."""
        return self._roster.backlog.tokens(*Lane)

    @property
    def queue_drain(self) -> Drain:
        """How fast the queue empties."""
        return self._roster.backlog.drain

    @property
    def paused(self) -> str:
        """Why the queue is; empty when it is not."""
        return self._roster.paused

    @property
    def counters(self) -> Counters:
        """Live: copy what you keep."""
        return self._roster.counters

    @property
    def num_running(self) -> int:
        return sum(len(executor.running) for executor in self._roster.executors.values())

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._roster.queues.values())

    @property
    def kv_cache_usage(self) -> float:
        """Held blocks over all blocks of the executors that are there; 0 without any."""
        blocks = [executor.blocks for executor in self._roster.executors.values() if executor.joined]
        total = sum(b.total for b in blocks)
        return sum(b.held for b in blocks) / total if total else 0.0

    def state(self, request_id: str) -> State | None:
        """None once it has ended, or if it never was."""
        live = self._roster.requests.get(request_id)
        return live.state if live is not None else None

    def executors(self) -> tuple[ExecutorView, ...]:
        """In the order they first joined, lost ones among them."""
        drained = self._roster.drained
        return tuple([_view(executor, executor.name in drained) for executor in self._roster.executors.values()])


def _view(executor: ExecutorState, drained: bool) -> ExecutorView:
    description = executor.description
    return ExecutorView(
        name=description.name,
        model=description.model,
        joined=executor.joined,
        epoch=executor.epoch,
        block_size=description.block_size,
        blocks=executor.blocks,
        free_blocks=executor.forecast.free,
        running=len(executor.running),
        steps=executor.steps,
        plans_out=len(executor.plans_out),
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=executor.max_num_batched_tokens,
        drained=drained,
    )


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
