"""All requests that have not ended and all executors, with every move of a request between queue, executor and end.

Whatever decides (planner, results, the scheduler's events) moves requests through these few methods only, so that state, queue,
sequence and effects cannot disagree. Must not know: policies' choices, plans, how results are read.
"""

from __future__ import annotations

from tokenmill_scheduler.core.alarms import Alarms
from tokenmill_scheduler.core.backlog import Backlog
from tokenmill_scheduler.core.counters import Counters, Preemption
from tokenmill_scheduler.core.effects import Effect
from tokenmill_scheduler.core.events import Submitted
from tokenmill_scheduler.core.executor import ExecutorState, unbind
from tokenmill_scheduler.core.live import Ending, LiveRequest
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.prediction import Prediction
from tokenmill_scheduler.core.queue import WaitingQueue, reordered
from tokenmill_scheduler.core.quotas import Quotas
from tokenmill_scheduler.core.request import QUEUED, State
from tokenmill_scheduler.core.sequence import Sequence


class Roster:
    """`effects` gathers what the event being handled has led to, in order.

    `awaited` has the addresses of executors that are to come, of which nobody knows yet what they can hold, the latest of them
    since `awaited_s`. `known` has those of all schedulers of the database, joined where another drives them now.
    `paused` says why the queue is, empty when it is not; `drained` says why for each executor that is, also one that is not there.
    """

    def __init__(self, ordering: Ordering, prediction: Prediction) -> None:
        self.ordering = ordering
        self.prediction = prediction
        self.lengths = prediction.lengths
        self.requests: dict[str, LiveRequest] = {}
        self.queues: dict[str, WaitingQueue] = {}
        self.executors: dict[str, ExecutorState] = {}
        self.deadlines = Alarms()
        self.backlog = Backlog()
        self.quotas = Quotas()
        self.counters = Counters()
        self.effects: list[Effect] = []
        # Of the event being handled.
        self.now_s = 0.0
        self.awaited: tuple[str, ...] = ()
        self.awaited_s = float("-inf")
        self.known: dict[str, ExecutorState] = {}
        self.paused = ""
        self.drained: dict[str, str] = {}
        self._last_ordinal = 0
        self._last_sequence_id = 0

    def queue(self, model: str) -> WaitingQueue:
        if model not in self.queues:
            self.queues[model] = WaitingQueue(self.ordering)
        return self.queues[model]

    def reorder(self, ordering: Ordering) -> None:
        """From now on. What runs goes on; where tenants begin to share fairly, what was made before is not charged."""
        if ordering.fair_share and not self.ordering.fair_share:
            for live in self.requests.values():
                live.paid = live.known
        self.ordering = ordering
        self.queues = {model: reordered(queue, ordering) for model, queue in self.queues.items()}

    def enter(self, submitted: Submitted) -> LiveRequest:
        """Takes in a request that is new to this scheduler, and the choices that wait with it, not yet queued."""
        live = self._enter(LiveRequest(submitted.request, self._next_ordinal(), submitted.state, list(submitted.output)))
        if submitted.choices:
            live.gang = [live]
            for choice in submitted.choices:
                live.gang.append(self._enter(LiveRequest(choice, self._next_ordinal(), State.WAITING, gang=live.gang)))
        return live

    def _enter(self, live: LiveRequest) -> LiveRequest:
        self.requests[live.request_id] = live
        self.watch_deadline(live)
        return live

    def _next_ordinal(self) -> int:
        self._last_ordinal += 1
        return self._last_ordinal

    def watch_deadline(self, live: LiveRequest) -> None:
        expires_s = live.expires_s
        if expires_s is None:
            self.deadlines.discard(live.request_id)
        else:
            self.deadlines.set(live.request_id, expires_s, live.ordinal)

    def enqueue(self, live: LiveRequest) -> None:
        """With the choices that wait with it."""
        self.queue(live.request.model).add(live)
        for choice in live.gang or (live,):
            self.backlog.came(choice, self.now_s)

    def _dequeue(self, live: LiveRequest, now_s: float) -> None:
        """One request alone: choices that wait with it stay, in its place."""
        queue, gang = self.queue(live.request.model), live.gang
        queue.remove(live.entry)
        live.gang = None
        if gang is not None:
            # How often they have been overtaken goes with the place in the queue.
            overtaken = gang[0].overtaken
            gang.remove(live)
            if gang:
                gang[0].overtaken = overtaken
                queue.add(gang[0])
        self.backlog.left(live, now_s)

    def admit(self, live: LiveRequest, executor: ExecutorState, now_s: float) -> Sequence:
        """From the queue into an executor, as a sequence with a number never used before."""
        self.queue(live.request.model).admitted(live, now_s)
        self._dequeue(live, now_s)
        if live.state is State.WAITING:
            self.counters.prompt_tokens += len(live.request.prompt)
            self.quotas.spent(live.request.tenant, len(live.request.prompt), now_s)
        self._last_sequence_id += 1
        limit = live.limit(executor.description.max_model_len)
        sequence = Sequence(self._last_sequence_id, executor.name, live, limit, live.known, live.known)
        sequence.admitted_in = executor.last_plan_id + 1
        sequence.may_skip = executor.description.caches_prefixes
        sequence.first = live.state is State.WAITING
        executor.take(sequence)
        self.quotas.admitted(sequence.sequence_id, live.request.tenant, executor.most_blocks(limit), now_s)
        live.sequence = sequence
        live.overtaken = 0
        self.effects.append(live.move(State.PREFILL, now_s, executor=executor.name))
        if live.request.queue_deadline_s is not None:
            self.watch_deadline(live)
        return sequence

    def preempt(self, sequence: Sequence, now_s: float, cause: Preemption, reason: str) -> None:
        """Gives up a running sequence's blocks and keeps its tokens, those of plans still out among them."""
        assert sequence.live is not None
        executor = self.executors[sequence.executor]
        executor.release(sequence)
        self.quotas.stopped(sequence.sequence_id, now_s)
        executor.batch_room += 1
        self._back_to_queue(sequence, now_s, cause, reason)
        if sequence.plans_out == 0:
            unbind(sequence)

    def lose(self, executor: ExecutorState, now_s: float, reason: str) -> None:
        """An executor is lost: what ran on it is queued again, and what was leaving it has left."""
        for sequence in executor.lose():
            self.quotas.freed(sequence.sequence_id, now_s)
            if sequence.live is not None and sequence.live.state not in QUEUED:
                self._back_to_queue(sequence, now_s, Preemption.EXECUTOR_LOST, reason)
            unbind(sequence)
        executor.lost_s = now_s

    def drain(self, executor: ExecutorState, now_s: float, reason: str) -> None:
        """What runs on an executor is queued again, but for what ends with the plans that are out."""
        for sequence in [s for s in executor.running.values() if not s.exhausted]:
            self.preempt(sequence, now_s, Preemption.EXECUTOR_DRAINED, reason)
        executor.batch_room = 0

    def recover(self, live: LiveRequest, now_s: float, reason: str, executor: str) -> None:
        """A request that ran when its scheduler died, on `executor`, which does not know it now."""
        self.effects.append(live.move(State.PREEMPTED, now_s, reason, executor))
        self.enqueue(live)

    def end(self, live: LiveRequest, ending: Ending, now_s: float, *, executor_let_go: bool = False) -> None:
        """To its end, from anywhere. `executor_let_go`: the executor has finished or dropped the sequence itself."""
        sequence = live.sequence
        if live.state in QUEUED:
            self._dequeue(live, now_s)
        elif sequence is not None:
            executor = self.executors[sequence.executor]
            if executor_let_go:
                executor.finish(sequence)
            else:
                executor.release(sequence)
            self.quotas.stopped(sequence.sequence_id, now_s)
            self.queue(live.request.model).settle(live)
        if ending.state is State.DONE:
            self.prediction.observe(live.request, len(live.output))
        self.effects.append(live.end(ending, now_s, sequence.executor if sequence else ""))
        if sequence is not None:
            unbind(sequence)
        self.drop(live)

    def give_away(self, live: LiveRequest, now_s: float) -> None:
        """One that waits: another scheduler goes on with it."""
        self._dequeue(live, now_s)
        self.drop(live)

    def drop(self, live: LiveRequest) -> None:
        del self.requests[live.request_id]
        self.deadlines.discard(live.request_id)

    def _back_to_queue(self, sequence: Sequence, now_s: float, cause: Preemption, reason: str) -> None:
        live = sequence.live
        assert live is not None
        live.computed_before = max(live.computed_before, sequence.computed)
        self.counters.preemptions += 1
        self.counters.preempted[cause] += 1
        self.effects.append(live.move(State.PREEMPTED, now_s, reason, sequence.executor))
        self.queue(live.request.model).settle(live)
        self.enqueue(live)
