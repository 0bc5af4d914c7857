"""The arithmetic of one sequence: known, computed and planned tokens. Prefill, chunks, decode and resume are all this.

    known     tokens there are: prompt and output, as results have confirmed them
    computed  of those, the ones whose keys and values are in the cache, as results have confirmed them
    planned   both figures as they will be, at the least, once every plan that is out has been carried out

A step advances a sequence by some tokens from computed towards known; the step that reaches known samples one token more. A plan is
made on the planned figures, before the results of the plans that are out.

The first advance may find a prefix in the executor's cache, which comes on top of what was booked: the sequence is then ahead of
the planned figures, never behind, and may sample in a plan that was booked as a chunk. A plan says "at most", so the plans that are
out stay right; the first result sets the figures straight. Must not know: requests' states, queues, the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill_scheduler.core.live import LiveRequest
    from tokenmill_scheduler.core.plans import Admission


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens inside one executor, from one admission to its release.

    `live` is the request its tokens are for; None once they are not wanted any more. `limit` is the number of tokens at which it
    ends for certain. `held` blocks are confirmed by results; `reserved` ≥ held are those it has or may still take without asking
    the forecast again, which is enough to plan up to `covered` tokens. `confirm_at` is how many computed tokens change what it
    holds; `narrowed`: it decodes, and what was booked for large chunks is given back. `finished`: the executor has let it go by
    itself. `bookings` has, for each plan out that advances it, by how many tokens at most, in how many steps. `predicted` tokens
    are expected from the prefix cache, until its first result says how many there were.

    `admitted_in`: the plan from which on it has a slot. `first`: its request has not been admitted before. `may_skip`: its first
    advance may find tokens that others have computed.
    `admission` makes it known to the executor, in the plan that advances it first; None after that. `siblings` are the sequences of
    one prompt that were admitted together, itself among them: the first that is left computes the prompt, the others wait for that
    and share its blocks (see `forks.py`). `lead` is another that is to compute this one's first `shared` tokens: it waits for
    them (see `coming.py`).
    """

    sequence_id: int
    executor: str
    live: LiveRequest | None
    limit: int
    known: int
    planned_known: int
    computed: int = 0
    planned_computed: int = 0
    predicted: int = 0
    bookings: list[tuple[int, int]] = field(default_factory=list)
    held: int = 0
    reserved: int = 0
    finished: bool = False
    covered: int = 0
    confirm_at: int = 1
    narrowed: bool = False
    may_skip: bool = False
    admitted_in: int = 0
    first: bool = False
    admission: Admission | None = None
    siblings: list[Sequence] = field(default_factory=list)
    lead: Sequence | None = None
    shared: int = 0

    @property
    def plans_out(self) -> int:
        """Plans out that advance it."""
        return len(self.bookings)

    @property
    def remaining(self) -> int:
        """Tokens still to plan until it samples; 1 while it decodes."""
        return max(1, self.planned_known - self.planned_computed - self.predicted)

    def most_computed(self, more_plans: int = 0) -> int:
        """Tokens that may be computed once the plans out, and so many more, are carried out: all but the last may be cached."""
        if self.computed:
            return self.planned_computed
        return min(self.known + max(0, self.plans_out + more_plans - 1), self.limit - 1)

    @property
    def exhausted(self) -> bool:
        """The plans out bring it to its limit: it is not advanced again, unless the last of them is cut short."""
        return self.planned_known >= self.limit

    def plan(self, count: int) -> None:
        """Books an advance by at most `count` tokens in one more plan, of one step."""
        self.bookings.append((count, 1))
        self._carry_out(count, 1)

    def go_on(self, steps: int) -> None:
        """Books so many further steps in the newest plan, of a sequence that decodes and does not pass its limit by them."""
        count, before = self.bookings[-1]
        self.bookings[-1] = (count + steps, before + steps)
        self._decode(steps)

    def settle(self, advanced: int, num_sampled: int) -> None:
        """Replaces what the oldest plan out was booked to do by what it did; `advanced` counts tokens computed and cached."""
        booked, _ = self.bookings.pop(0)
        self.computed += advanced
        self.known += num_sampled
        self.predicted = 0
        if advanced != booked:
            self.planned_computed, self.planned_known = self.computed, self.known
            for count, steps in self.bookings:
                self._carry_out(count, steps)

    def _carry_out(self, count: int, steps: int) -> None:
        """What one plan does to the planned figures, as the executor does it: who samples in a step takes a further one."""
        if self.exhausted:
            return
        first = min(count, self.planned_known - self.planned_computed)
        self.planned_computed += first
        if self.planned_computed == self.planned_known:
            self.planned_known += 1
            if steps > 1:
                self._decode(min(steps - 1, count - first, self.limit - self.planned_known))

    def _decode(self, steps: int) -> None:
        self.planned_computed += steps
        self.planned_known += steps
