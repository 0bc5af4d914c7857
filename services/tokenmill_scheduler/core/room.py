"""Whether an executor has room for a waiting request: ever, and now. Asks, changes nothing.

Must not know: the plan being made, the order of the queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill_scheduler.core.admission import AdmissionMode
from tokenmill_scheduler.core.backlog import most_tokens
from tokenmill_scheduler.core.executor import ExecutorState
from tokenmill_scheduler.core.live import RESOURCE_EXHAUSTED, Ending, LiveRequest
from tokenmill_scheduler.core.request import FinishReason, Request, State
from tokenmill_scheduler.core.roster import Roster


class Room:
    """`watermark` is the share of an executor's blocks that admissions leave to the sequences that run."""

    def __init__(self, roster: Roster, admission: AdmissionMode, watermark: float) -> None:
        self._roster = roster
        self._admission = admission
        self._watermark = watermark

    def can_be_held(self, live: LiveRequest) -> bool:
        """Whether any executor of its model can hold it alone, with the choices that wait with it, at any scheduler.

        Lost ones among them, which may be back; one that has not been here yet may be large enough, for all that is known.
        """
        return bool(self._roster.awaited or self.holders(live) or self.known_holders(live))

    def holders(self, live: LiveRequest) -> list[ExecutorState]:
        """The executors of its model, lost ones among them, that can hold it, with the choices that wait with it."""
        return self._holders(self._roster.executors.values(), live)

    def known_holders(self, live: LiveRequest) -> list[ExecutorState]:
        """As `holders`, of those of all schedulers of the database."""
        return self._holders(self._roster.known.values(), live)

    def _holders(self, executors: Iterable[ExecutorState], live: LiveRequest) -> list[ExecutorState]:
        return [e for e in executors if e.description.model == live.request.model and _can_hold(e, live)]

    def most_choices(self, model: str, num_prompt_tokens: int, max_tokens: int) -> int | None:
        """Of a prompt of so many tokens, the most that can ever run at once; None while no executor of the model is known."""
        executors = [e for e in self._roster.executors.values() if e.description.model == model]
        return max((_most_choices(e, num_prompt_tokens, max_tokens) for e in executors), default=None)

    def can_hold(self, executor: ExecutorState, live: LiveRequest) -> bool:
        """Whether it can run there when nothing else does, with the choices that wait with it."""
        return _can_hold(executor, live)

    def is_candidate(self, live: LiveRequest, executor: ExecutorState) -> bool:
        """False for one that needs a larger executor, or is still being released by another one: it holds up nobody here."""
        here = live.sequence is None or live.sequence.executor == executor.name
        return here and _can_hold(executor, live)

    def blocks_needed(self, live: LiveRequest, executor: ExecutorState) -> int:
        """Blocks to book for it, of those that there are: for all known tokens and such as the mode of admission adds.

        Of all choices that are admitted together, as if they shared none.
        """
        last_computed = live.limit(executor.description.max_model_len) - 1
        most = executor.description.num_blocks // live.gang_size
        return live.gang_size * min(executor.forecast.blocks(self._admission.tokens(live, last_computed)), most)

    def most_blocks(self, live: LiveRequest, executor: ExecutorState) -> int:
        """Blocks that it can come to, with the choices that wait with it."""
        return sum(executor.most_blocks(choice.limit(executor.description.max_model_len)) for choice in live.gang or (live,))

    def least_blocks(self, request: Request) -> int:
        """Blocks that a request that is not here yet can come to, with all its choices, where that is least; 0 if unknown."""
        blocks = [
            executor.most_blocks(min(most_tokens(request), executor.description.max_model_len))
            for executor in self._roster.executors.values()
            if executor.joined and executor.description.model == request.model
        ]
        return request.best_of * min(blocks, default=0)

    def blocks_free(self, executor: ExecutorState) -> int:
        """Blocks above the watermark; where nothing runs, or nothing grows, there is nobody to keep them for."""
        kept = int(self._watermark * executor.description.num_blocks) if executor.running and self._admission.grows else 0
        return executor.forecast.free - kept

    def is_short(self, live: LiveRequest, executor: ExecutorState) -> bool:
        return self.blocks_needed(live, executor) > self.blocks_free(executor)


def too_long(live: LiveRequest) -> Ending:
    """How one ends that can be held nowhere."""
    error = f"{live.known} tokens, prompt and output, are more than the KV blocks or the model length of any executor allow"
    if live.gang_size > 1:
        error = f"{live.gang_size} choices of {live.known} tokens are more than any executor has slots or KV blocks for at once"
    return Ending(State.FAILED, FinishReason.ERROR, "too long", error, RESOURCE_EXHAUSTED)


def _can_hold(executor: ExecutorState, live: LiveRequest) -> bool:
    """Whether it can run when nothing else is there; with it the choices that wait with it, each in its own slot and blocks."""
    if not executor.can_hold(live.known):
        return False
    return live.gang_size == 1 or live.gang_size <= _most_choices(executor, live.known, live.request.sampling.max_tokens)


def _most_choices(executor: ExecutorState, num_tokens: int, max_tokens: int) -> int:
    """Sequences of so many tokens, each with one more that is to be computed, that can run at once when nothing else is there."""
    limit = min(num_tokens + max_tokens, executor.description.max_model_len)
    each = executor.forecast.blocks(max(1, min(num_tokens + 1, limit - 1)))
    return min(executor.max_num_seqs, executor.description.num_blocks // each)
