"""The arithmetic of one sequence: known, computed and planned tokens. Prefill, chunks, decode and resume are all this.

    known     tokens there are: prompt and output, as results have confirmed them
    computed  of those, the ones whose keys and values are in the cache, as results have confirmed them
    planned   both figures as they will be once every plan that is out has been carried out

A step advances a sequence by some tokens from computed towards known; the step that reaches known samples one token more. A plan is
made on the planned figures, before the results of the plans that are out. Must not know: requests' states, queues, the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill_scheduler.core.live import LiveRequest


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens inside one executor, from one admission to its release.

    `live` is the request its tokens are for; None once they are not wanted any more. `limit` is the number of tokens at which it
    ends for certain. `held` blocks are confirmed by results; `reserved` ≥ held are those it has or may still take without asking
    the forecast again. `finished`: the executor has let it go by itself. `plans_out` counts the plans out that advance it.
    """

    sequence_id: int
    executor: str
    live: LiveRequest | None
    limit: int
    known: int
    planned_known: int
    computed: int = 0
    planned_computed: int = 0
    plans_out: int = 0
    held: int = 0
    reserved: int = 0
    finished: bool = False

    @property
    def remaining(self) -> int:
        """Tokens still to plan until it samples; 1 while it decodes."""
        return self.planned_known - self.planned_computed

    @property
    def exhausted(self) -> bool:
        """The plans out bring it to its limit: it is not advanced again."""
        return self.planned_known >= self.limit

    def plan(self, count: int) -> bool:
        """Books an advance by `count` ≤ remaining tokens in one more plan; says whether that plan samples."""
        self.plans_out += 1
        self.planned_computed += count
        if self.planned_computed < self.planned_known:
            return False
        self.planned_known += 1
        return True

    def settle(self, count: int, samples: bool, num_computed: int, num_sampled: int) -> None:
        """Replaces what one plan was booked to do (`count`, `samples`) by what its result says it did."""
        self.plans_out -= 1
        self.computed += num_computed
        self.known += num_sampled
        self.planned_computed += num_computed - count
        self.planned_known += num_sampled - samples
