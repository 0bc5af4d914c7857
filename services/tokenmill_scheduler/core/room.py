"""Whether an executor has room for a waiting request: ever, and now. Asks, changes nothing.

Must not know: the plan being made, the order of the queue.
"""

from __future__ import annotations

from tokenmill_scheduler.core import quarantine
from tokenmill_scheduler.core.batching import Batching
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.core.roster import Roster


class Room:
    """`watermark` is the share of an executor's blocks that admissions leave to the sequences that run."""

    def __init__(self, roster: Roster, batching: Batching, watermark: float) -> None:
        self._roster = roster
        self._batching = batching
        self._watermark = watermark

    def can_be_held(self, live: LiveRequest) -> bool:
        """Whether any executor of its model, lost ones among them, can hold it alone."""
        model = live.request.model
        return any(e.can_hold(live.known) for e in self._roster.executors.values() if e.description.model == model)

    def is_candidate(self, live: LiveRequest, executor: ExecutorState) -> bool:
        """False for one that needs a larger executor, or is still being released by another one: it holds up nobody here."""
        here = live.sequence is None or live.sequence.executor == executor.name
        return here and executor.can_hold(live.known)

    def blocks_needed(self, live: LiveRequest, executor: ExecutorState) -> int:
        """Blocks for all known tokens and the next one, unless that will never be computed or there are no more blocks."""
        last_computed = live.limit(executor.description.max_model_len) - 1
        return min(executor.forecast.blocks(min(live.known + 1, last_computed)), executor.description.num_blocks)

    def blocks_free(self, executor: ExecutorState) -> int:
        """Blocks above the watermark; on an executor where nothing runs there is nobody to keep them for."""
        kept = int(self._watermark * executor.description.num_blocks) if executor.running else 0
        return executor.forecast.free - kept

    def is_short(self, live: LiveRequest, executor: ExecutorState) -> bool:
        return self.blocks_needed(live, executor) > self.blocks_free(executor)

    def wait_reason(self, live: LiveRequest) -> str:
        """Why a queued request runs nowhere, in a few words."""
        model = live.request.model
        joined = [e for e in self._roster.executors.values() if e.joined and e.description.model == model]
        if not joined:
            return f"no executor serves {model!r} now"
        if live.sequence is not None:
            return "its blocks are being released"
        if self._roster.paused and live.state is State.WAITING:
            return f"the queue is paused {self._roster.paused}"
        able = [executor for executor in joined if executor.can_hold(live.known)]
        if not able:
            return "it needs a larger executor"
        if live.suspect_until:
            return "an executor was lost while it ran: such requests are tried one at a time"
        closed = [self._closed_because(executor) for executor in able]
        if all(closed):
            return closed[0]
        short = all(self.is_short(live, executor) for executor in able)
        return "not enough free KV blocks" if short else "others are before it in the queue"

    def _closed_because(self, executor: ExecutorState) -> str:
        """Why an executor admits nobody, in a few words; empty if it does."""
        if executor.name in self._roster.drained:
            return f"executor {executor.name} is drained {self._roster.drained[executor.name]}"
        if quarantine.on_trial(executor):
            return "a request that may have killed an executor is tried alone"
        return self._batching.closed_because(executor)
