"""All requests that have not ended and all executors, with every move of a request between queue, executor and end.

Whatever decides (planner, results, the scheduler's events) moves requests through these few methods only, so that state, queue,
sequence and effects cannot disagree. Must not know: policies' choices, plans, how results are read.
"""

from __future__ import annotations

from tokenmill_scheduler.core.alarms import Alarms
from tokenmill_scheduler.core.counters import Counters, Preemption
from tokenmill_scheduler.core.executor import ExecutorState, unbind
from tokenmill_scheduler.core.live import Ending, LiveRequest
from tokenmill_scheduler.core.policy import Policy
from tokenmill_scheduler.core.queue import WaitingQueue
from tokenmill_scheduler.core.records import Effect, Submitted
from tokenmill_scheduler.core.request import QUEUED, State
from tokenmill_scheduler.core.sequence import Sequence

# The part of a queue that may be admitted now, soonest first.
Waiting = WaitingQueue | list[LiveRequest]


class Roster:
    """`effects` gathers what the event being handled has led to, in order.

    `paused` says why the queue is, empty when it is not; `drained` says why for each executor that is, also one that is not there.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.requests: dict[str, LiveRequest] = {}
        self.queues: dict[str, WaitingQueue] = {}
        self.executors: dict[str, ExecutorState] = {}
        self.deadlines = Alarms()
        self.counters = Counters()
        self.effects: list[Effect] = []
        self.paused = ""
        self.drained: dict[str, str] = {}
        self._last_ordinal = 0
        self._last_sequence_id = 0

    def queue(self, model: str) -> WaitingQueue:
        if model not in self.queues:
            self.queues[model] = WaitingQueue(self.policy)
        return self.queues[model]

    def admissible(self, queue: WaitingQueue) -> Waiting:
        """While the queue is paused, only those that have run already: running requests go on."""
        return [live for live in queue if live.state is State.PREEMPTED] if self.paused else queue

    def enter(self, submitted: Submitted) -> LiveRequest:
        """Takes in a request that is new to this scheduler, not yet queued."""
        self._last_ordinal += 1
        request = submitted.request
        live = LiveRequest(request, self._last_ordinal, submitted.state, list(submitted.output))
        self.requests[request.request_id] = live
        self.watch_deadline(live)
        return live

    def watch_deadline(self, live: LiveRequest) -> None:
        expires_s = live.expires_s
        if expires_s is None:
            self.deadlines.discard(live.request_id)
        else:
            self.deadlines.set(live.request_id, expires_s, live.ordinal)

    def enqueue(self, live: LiveRequest) -> None:
        self.queue(live.request.model).add(live)

    def admit(self, live: LiveRequest, executor: ExecutorState, now_s: float) -> Sequence:
        """From the queue into an executor, as a sequence with a number never used before."""
        self.queue(live.request.model).remove(live)
        if live.state is State.WAITING:
            self.counters.prompt_tokens += len(live.request.prompt)
        self._last_sequence_id += 1
        limit = live.limit(executor.description.max_model_len)
        sequence = Sequence(self._last_sequence_id, executor.name, live, limit, live.known, live.known)
        executor.running[sequence.sequence_id] = sequence
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
        executor.batch_room += 1
        self._back_to_queue(sequence.live, executor.name, now_s, cause, reason)
        if sequence.plans_out == 0:
            unbind(sequence)

    def lose(self, executor: ExecutorState, now_s: float, reason: str) -> None:
        """An executor is gone: what ran on it is queued again, and what was leaving it has left."""
        for sequence in executor.lose():
            live = sequence.live
            unbind(sequence)
            if live is not None and live.state not in QUEUED:
                self._back_to_queue(live, executor.name, now_s, Preemption.EXECUTOR_LOST, reason)

    def drain(self, executor: ExecutorState, now_s: float, reason: str) -> None:
        """What runs on an executor is queued again, but for what ends with the plans that are out."""
        for sequence in [s for s in executor.running.values() if not s.exhausted]:
            self.preempt(sequence, now_s, Preemption.EXECUTOR_DRAINED, reason)
        executor.batch_room = 0

    def recover(self, live: LiveRequest, now_s: float, reason: str) -> None:
        """A request that ran when its scheduler died: no executor knows it now."""
        self.effects.append(live.move(State.PREEMPTED, now_s, reason))
        self.enqueue(live)

    def end(self, live: LiveRequest, ending: Ending, now_s: float, *, executor_let_go: bool = False) -> None:
        """To its end, from anywhere. `executor_let_go`: the executor has finished or dropped the sequence itself."""
        sequence = live.sequence
        if live.state in QUEUED:
            self.queue(live.request.model).remove(live)
        elif sequence is not None and executor_let_go:
            self.executors[sequence.executor].finish(sequence)
        elif sequence is not None:
            self.executors[sequence.executor].release(sequence)
        self.effects.append(live.end(ending, now_s, sequence.executor if sequence else ""))
        if sequence is not None:
            unbind(sequence)
        self.drop(live)

    def drop(self, live: LiveRequest) -> None:
        del self.requests[live.request_id]
        self.deadlines.discard(live.request_id)

    def _back_to_queue(self, live: LiveRequest, executor: str, now_s: float, cause: Preemption, reason: str) -> None:
        self.counters.preemptions += 1
        self.counters.preempted[cause] += 1
        self.effects.append(live.move(State.PREEMPTED, now_s, reason, executor))
        self.enqueue(live)
