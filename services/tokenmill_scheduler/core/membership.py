"""Which executors there are, and of which it is known that they come, stand elsewhere or are to be left alone.

Each event about executors is a method here; what it means for requests is the roster's and the quarantine's to do.
Must not know: requests, the order of the queue, plans.
"""

from __future__ import annotations

from tokenmill_scheduler.core import quarantine
from tokenmill_scheduler.core.events import (
    ExecutorDrained,
    ExecutorGone,
    ExecutorJoined,
    ExecutorLost,
    ExecutorsAwaited,
    ExecutorsKnown,
    ExecutorUndrained,
    KnownExecutor,
)
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.plans import Blocks, ExecutorDescription
from tokenmill_scheduler.core.roster import Roster


class Membership:
    """`max_num_seqs` and `max_num_batched_tokens` hold for every executor whose own limits are not lower.

    `max_losses`: how many executors a request may cost before it fails.
    """

    def __init__(self, roster: Roster, max_num_seqs: int, max_num_batched_tokens: int, max_losses: int) -> None:
        self._roster = roster
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_losses = max_losses

    def joined(self, event: ExecutorJoined, now_s: float) -> None:
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

    def lost(self, event: ExecutorLost, now_s: float) -> None:
        executor = self._roster.executors.get(event.executor)
        if executor is not None and executor.joined and executor.epoch == event.epoch:
            reason = f"executor lost: {event.reason}"
            if event.lives:
                self._roster.lose(executor, now_s, reason)
            else:
                self._lose(executor, now_s, reason)

    def drained(self, event: ExecutorDrained, now_s: float) -> None:
        """Remembered for executors that are not there, too."""
        self._roster.drained[event.executor] = event.why
        executor = self._roster.executors.get(event.executor)
        if executor is not None:
            self._roster.drain(executor, now_s, f"executor drained {event.why}")

    def undrained(self, event: ExecutorUndrained) -> None:
        self._roster.drained.pop(event.executor, None)

    def awaited(self, event: ExecutorsAwaited, now_s: float) -> None:
        if not set(event.addresses) <= set(self._roster.awaited):
            self._roster.awaited_s = now_s
        self._roster.awaited = event.addresses

    def gone(self, event: ExecutorGone) -> None:
        self._roster.executors.pop(event.executor.name, None)
        self._roster.known[event.executor.name] = self._known(KnownExecutor(event.executor, elsewhere=True))

    def known(self, event: ExecutorsKnown) -> None:
        self._roster.known = {other.description.name: self._known(other) for other in event.executors}

    def _lose(self, executor: ExecutorState, now_s: float, reason: str) -> None:
        """Of what it may have died of, nobody knows."""
        quarantine.lose(self._roster, executor, now_s, reason, self._max_losses)

    def _known(self, executor: KnownExecutor) -> ExecutorState:
        state = self._executor(executor.description, Blocks(0, 0, 0))
        state.joined = executor.elsewhere
        return state

    def _executor(self, description: ExecutorDescription, blocks: Blocks, epoch: int = 0) -> ExecutorState:
        tokens = min(self._max_num_batched_tokens, description.max_num_batched_tokens)
        # Every decode is in every plan, so a step has to have a token for each slot.
        seqs = min(self._max_num_seqs, description.max_num_seqs, tokens)
        return ExecutorState(description, epoch, blocks, seqs, tokens)
