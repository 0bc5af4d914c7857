"""The pure scheduler: events in, effects out. No I/O, clock, randomness, logging, protobuf or SQL.

`Scheduler.handle` is the whole of it. Requests and executors live in the `Roster`; `Planner` makes plans, asking `Room` who fits;
`apply_result` reads results. Same events, same effects, in the same order: nothing here iterates over a set or draws a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill_scheduler.core import quarantine
from tokenmill_scheduler.core.batching import batching_named
from tokenmill_scheduler.core.counters import Counters, ExecutorView
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.live import Ending
from tokenmill_scheduler.core.planner import Planner
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.records import (
    Cancelled,
    Effect,
    Event,
    ExecutorDrained,
    ExecutorJoined,
    ExecutorLost,
    ExecutorUndrained,
    Expired,
    PlanDue,
    PlanIssued,
    QueuePaused,
    QueueResumed,
    ResultArrived,
    Submitted,
    Tick,
    Updated,
)
from tokenmill_scheduler.core.request import QUEUED, RUNNING, FinishReason, State
from tokenmill_scheduler.core.results import apply_result
from tokenmill_scheduler.core.room import Room
from tokenmill_scheduler.core.roster import Roster

_EXPIRED = Ending(State.EXPIRED, FinishReason.EXPIRED, "deadline passed")
_EXPIRED_IN_QUEUE = Ending(State.EXPIRED, FinishReason.EXPIRED, "waited in the queue as long as its queue timeout allows")
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
    # how often, in all, later requests may be admitted before a waiting one because more of their prefix is cached
    max_hit_overtakes: int = 32
    # how many executors a request may cost, tried alone after the first, before it fails; at least 2
    max_executor_losses: int = 2


class Scheduler:
    """Owned by one loop. Raises KeyError for an unknown policy or batching mode."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._batching = batching_named(config.batching, config.max_waiting_time_s)
        self._roster = Roster(POLICIES[config.policy]())
        self._room = Room(self._roster, self._batching, config.watermark)
        self._planner = Planner(self._roster, self._batching, self._room, config.max_overtakes, config.max_hit_overtakes)

    # ---- events ----

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Applies one event at time `now_s` (Unix seconds, never going back); the effects are in the order to be carried out."""
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
            case QueuePaused():
                self._roster.paused = event.why
            case QueueResumed():
                self._roster.paused = ""
            case Tick():
                self._expire(now_s)
        effects, self._roster.effects = self._roster.effects, []
        return effects

    def _submitted(self, event: Submitted, now_s: float) -> None:
        """One that is known already is not taken in twice."""
        if event.request.request_id in self._roster.requests:
            return
        live = self._roster.enter(event)
        for executor in self._roster.executors.values():
            if executor.joined and executor.description.model == event.request.model:
                executor.mirror.prepare(live)
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
            queue.remove(live)
        live.update(event.priority, event.deadline_s)
        if queue is not None:
            queue.add(live)
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
        tokens = min(self.config.max_num_batched_tokens, description.max_num_batched_tokens)
        # Every decode is in every plan, so a step has to have a token for each slot.
        seqs = min(self.config.max_num_seqs, description.max_num_seqs, tokens)
        executor = ExecutorState(description, event.epoch, event.blocks, seqs, tokens)
        executor.mirror.apply((), event.stored)
        self._roster.executors[description.name] = executor

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

    def _result_arrived(self, event: ResultArrived, now_s: float) -> None:
        executor = self._roster.executors.get(event.executor)
        if executor is None:
            self._roster.counters.stale_results += 1
            return
        apply_result(self._roster, executor, event.result, event.text_stops, now_s)

    def _plan_due(self, event: PlanDue, now_s: float) -> None:
        self._expire(now_s)
        executor = self._roster.executors.get(event.executor)
        if executor is None or not executor.has_plan_room:
            return
        executor.asked_s = now_s
        plan = self._planner.plan(executor, now_s)
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

    def next_wakeup_s(self) -> float | None:
        """When to hand in a Tick, and ask for plans, although nothing has happened: a deadline, or the start of a static batch.

        Unix seconds; may have passed already. None: only an event can change anything.
        """
        times = [
            due_s
            for executor in self._roster.executors.values()
            if executor.has_plan_room
            and (due_s := self._batching.wakeup_s(executor, self._roster.queue(executor.description.model))) is not None
            and due_s > executor.asked_s
        ]
        earliest = self._roster.deadlines.earliest()
        return min(times + ([earliest[0]] if earliest else []), default=None)

    def max_num_seqs(self, executor: str) -> int:
        """Most sequences in a step of an executor that has joined."""
        return self._roster.executors[executor].max_num_seqs

    def wait_reason(self, request_id: str) -> str:
        """Why a request waits, in a few words; empty if it does not wait or is unknown."""
        live = self._roster.requests.get(request_id)
        if live is None or live.state not in QUEUED:
            return ""
        return self._room.wait_reason(live)

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
