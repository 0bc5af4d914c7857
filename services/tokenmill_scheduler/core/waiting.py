"""Why requests wait: for one of them a code and words, for all of them counts by code. Asks, changes nothing.

Must not know: the plan being made, who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from tokenmill_scheduler.core import quarantine
from tokenmill_scheduler.core.batching import Batching
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.queue import WaitingQueue
from tokenmill_scheduler.core.request import Lane, State
from tokenmill_scheduler.core.room import Room
from tokenmill_scheduler.core.roster import Roster
from tokenmill_scheduler.core.warden import Warden

# Of each queue, so many are looked at for the counts, at 4 µs each: plans wait meanwhile.
LOOKED_AT = 200


class WaitCode(StrEnum):
    NO_EXECUTOR = "no_executor"
    BEING_RELEASED = "being_released"
    PAUSED = "paused"
    NEEDS_LARGER_EXECUTOR = "needs_larger_executor"
    SUSPECT = "suspect"
    OVER_QUOTA = "over_quota"
    OVERLOAD = "overload"
    DRAINED = "drained"
    ON_TRIAL = "on_trial"
    NO_SLOT = "no_slot"
    BATCH_RUNS = "batch_runs"
    BATCH_NOT_FULL = "batch_not_full"
    NO_BLOCKS = "no_blocks"
    LOWER_PRIORITY = "lower_priority"
    BEHIND_OTHERS = "behind_others"
    # Told by the shell alone: another scheduler of the database has it.
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class WaitReason:
    """`words` for people, `code` to count by."""

    code: WaitCode
    words: str


_RELEASED = WaitReason(WaitCode.BEING_RELEASED, "its blocks are being released")
_SUSPECT = WaitReason(WaitCode.SUSPECT, "an executor was lost while it ran: such requests are tried one at a time")
_ON_TRIAL = WaitReason(WaitCode.ON_TRIAL, "a request that may have killed an executor is tried alone")
_NO_SLOT = WaitReason(WaitCode.NO_SLOT, "all slots are taken")
_BATCH_RUNS = WaitReason(WaitCode.BATCH_RUNS, "the running batch has not ended")
_BATCH_NOT_FULL = WaitReason(WaitCode.BATCH_NOT_FULL, "the batch is not full")
_NO_BLOCKS = WaitReason(WaitCode.NO_BLOCKS, "not enough free KV blocks")
_LOWER = WaitReason(WaitCode.LOWER_PRIORITY, "requests of a higher lane or priority are before it in the queue")
_BEHIND = WaitReason(WaitCode.BEHIND_OTHERS, "others are before it in the queue")


class WaitReasons:
    def __init__(self, roster: Roster, batching: Batching, room: Room, warden: Warden) -> None:
        self._roster = roster
        self._batching = batching
        self._room = room
        self._warden = warden

    def of(self, live: LiveRequest) -> WaitReason:
        """Of a queued request, as things stand."""
        model = live.request.model
        return self._reason(live.entry, self._joined(model), self._roster.queue(model))

    def counts(self) -> dict[str, int]:
        """Requests by code. Behind the first LOOKED_AT of a queue, what keeps one waiting is that others are before it."""
        counts: dict[str, int] = {}
        for model, queue in self._roster.queues.items():
            left, joined = len(queue), self._joined(model)
            for live in islice(queue, LOOKED_AT):
                code = self._reason(live, joined, queue).code
                counts[code] = counts.get(code, 0) + live.gang_size
                left -= live.gang_size
            if left:
                code = WaitCode.BEHIND_OTHERS if joined else WaitCode.NO_EXECUTOR
                counts[code] = counts.get(code, 0) + left
        return counts

    def _joined(self, model: str) -> list[tuple[ExecutorState, WaitReason | None]]:
        """Executors of a model that are there, each with why it admits nobody, if it does not."""
        executors = self._roster.executors.values()
        return [(e, self._closed_because(e)) for e in executors if e.joined and e.description.model == model]

    def _reason(
        self, live: LiveRequest, joined: Sequence[tuple[ExecutorState, WaitReason | None]], queue: WaitingQueue
    ) -> WaitReason:
        if not joined:
            return WaitReason(WaitCode.NO_EXECUTOR, f"no executor serves {live.request.model!r} now")
        if live.sequence is not None:
            return _RELEASED
        if self._roster.paused and live.state is State.WAITING:
            return WaitReason(WaitCode.PAUSED, f"the queue is paused {self._roster.paused}")
        able = [(executor, closed) for executor, closed in joined if self._room.can_hold(executor, live)]
        if not able:
            return self._needs_larger(live)
        if live.suspect_until:
            return _SUSPECT
        return self._held_back(live, able) or self._crowded_out(live, able, queue)

    def _needs_larger(self, live: LiveRequest) -> WaitReason:
        """It waits because there was one, or may be, which can still come; else it would have failed."""
        lost = [executor.name for executor in self._room.holders(live)]
        words = "it needs a larger executor"
        if lost:
            words += f": {' or '.join(lost)}, which is lost"
        elif known := [executor.name for executor in self._room.known_holders(live)]:
            words += f": {' or '.join(known)}, which is not here"
        elif self._roster.awaited:
            words += f": maybe that at {' or '.join(self._roster.awaited)}, which has not been here yet"
        return WaitReason(WaitCode.NEEDS_LARGER_EXECUTOR, words)

    def _held_back(self, live: LiveRequest, able: Sequence[tuple[ExecutorState, WaitReason | None]]) -> WaitReason | None:
        """By a quota or because there is too much work, whatever room there is."""
        quotas, now_s, tenant = self._roster.quotas, self._roster.now_s, live.request.tenant
        over = [quotas.over(tenant, live.gang_size, self._room.most_blocks(live, e), now_s) for e, _ in able]
        if all(over):
            return WaitReason(WaitCode.OVER_QUOTA, over[0])
        if live.request.lane is Lane.BATCH and all(self._warden.holds_batch(executor) for executor, _ in able):
            return WaitReason(WaitCode.OVERLOAD, f"the batch lane is held back: {self._warden.why}")
        return None

    def _crowded_out(
        self, live: LiveRequest, able: Sequence[tuple[ExecutorState, WaitReason | None]], queue: WaitingQueue
    ) -> WaitReason:
        closed = [reason for _, reason in able if reason is not None]
        if len(closed) == len(able):
            return closed[0]
        if live.gang_size > 1 and all(e.max_num_seqs - e.slots_taken < live.gang_size for e, _ in able):
            words = f"its {live.gang_size} choices are admitted together, and there are not so many free slots"
            return WaitReason(WaitCode.NO_SLOT, words)
        if all(self._room.is_short(live, executor) for executor, _ in able):
            return _NO_BLOCKS
        return _LOWER if queue.is_outranked(live) else _BEHIND

    def _closed_because(self, executor: ExecutorState) -> WaitReason | None:
        """Why an executor admits nobody; None if it does."""
        if executor.name in self._roster.drained:
            words = f"executor {executor.name} is drained {self._roster.drained[executor.name]}"
            return WaitReason(WaitCode.DRAINED, words)
        if quarantine.on_trial(executor):
            return _ON_TRIAL
        if not self._batching.is_closed(executor):
            return None
        if self._batching.displaces:
            return _NO_SLOT
        return _BATCH_RUNS if executor.running else _BATCH_NOT_FULL
