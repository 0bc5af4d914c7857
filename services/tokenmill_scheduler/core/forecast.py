"""How many blocks of one executor can still be promised: a figure that is never higher than what is really free.

    free = available in the last result
         − blocks that the plans still out may take
         − blocks booked for admitted sequences and not planned yet

Both deductions are, for each sequence, `reserved − held`: the most it may have after all that is promised, less what the last
result says it has. Blocks of a released or finished sequence become free when a result says so, never before.

An executor's layers may be of several groups, each with blocks of its own from one pool, and those of a group with a sliding window
come back once no token to be computed sees them, which is when the result of the tokens before it is in. So a sequence holds

    groups · ⌈planned tokens / block size⌉ − what the windows have left behind at its computed tokens

and on its way through a long prompt no more than its windows and the tokens of the plans out together can touch.
Must not know: requests, plans, policies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill_scheduler.core.plans import FULL_ATTENTION, BlockGroup
from tokenmill_scheduler.core.sequence import Sequence


@dataclass(slots=True)
class Forecast:
    """`available` is as the last result reported it; `promised` is the sum of reserved − held over all sequences.

    `depth` plans may be out at once, each with `step_tokens` tokens at most.
    """

    block_size: int
    available: int
    groups: tuple[BlockGroup, ...] = FULL_ATTENTION
    depth: int = 1
    step_tokens: int = 1
    promised: int = 0
    # Of each group with a window: that, and the blocks of its sinks.
    _windows: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._windows = [(g.sliding_window, -(-g.sinks // self.block_size)) for g in self.groups if g.sliding_window]

    @property
    def free(self) -> int:
        return self.available - self.promised

    def blocks(self, tokens: int) -> int:
        """Blocks to promise a sequence that computes so many tokens: the most it holds on its way, in chunks as large as can be."""
        return self._most(tokens, self.depth * self.step_tokens)

    def least(self, tokens: int) -> int:
        """Blocks without which so many tokens cannot be computed, not even one by one."""
        return self._most(tokens, 1)

    def lacking(self, sequence: Sequence) -> int:
        """Blocks beyond its reservation that the next token takes, when the plans that are out have brought back theirs."""
        planned = sequence.planned_computed
        return max(0, self._held(planned, planned + 1) - sequence.reserved)

    def wanted(self, sequence: Sequence, tokens: int = 1) -> int:
        """As `lacking`, of so many tokens, for a plan that does not wait for those that are out."""
        return max(0, self._held(sequence.computed, sequence.planned_computed + tokens) - sequence.reserved)

    def reserve(self, sequence: Sequence, blocks: int) -> None:
        """Promises a sequence `blocks` more; the caller has seen that they are free."""
        self._set(sequence, sequence.held, sequence.reserved + blocks)

    def confirm(self, sequence: Sequence) -> None:
        """A result has come in: the sequence holds blocks for all it has computed, less those that windows have left behind."""
        held = self._held(sequence.computed, sequence.computed)
        if self._windows:
            self._narrow(sequence)
        self._set(sequence, held, max(sequence.reserved, held))
        sequence.confirm_at = self._next_change(sequence.computed)

    def trim(self, sequence: Sequence) -> None:
        """The sequence will be planned no more: takes back what was booked beyond the plans that are out."""
        self._set(sequence, sequence.held, max(sequence.held, self._held(sequence.computed, sequence.planned_computed)))

    def forget(self, sequence: Sequence) -> None:
        """The executor has dropped the sequence, and the last result shows its blocks as available."""
        self._set(sequence, 0, 0)

    def held(self, sequence: Sequence) -> int:
        """Blocks that it holds by the last result."""
        return self._held(sequence.computed, sequence.computed)

    def most_held(self, sequence: Sequence) -> int:
        """Blocks that it holds at most while the plans that are out are carried out."""
        return self._held(sequence.computed, sequence.planned_computed)

    # ---- arithmetic ----

    def _held(self, computed: int, planned: int) -> int:
        blocks = len(self.groups) * -(-planned // self.block_size)
        return blocks - self._left_behind(computed) if self._windows else blocks

    def _left_behind(self, computed: int) -> int:
        """Blocks that no token from position `computed` on can see."""
        return sum(max(0, max(0, computed - window + 1) // self.block_size - sinks) for window, sinks in self._windows)

    def _most(self, tokens: int, in_flight: int) -> int:
        """The most blocks on the way to `tokens`, with so many at once planned and not computed."""
        whole = -(-tokens // self.block_size)
        most = (len(self.groups) - len(self._windows)) * whole
        for window, sinks in self._windows:
            # As many as an interval of so many positions can touch.
            most += min(whole, (window + in_flight + self.block_size - 3) // self.block_size + 1 + sinks)
        return most

    def _narrow(self, sequence: Sequence) -> None:
        """Once it decodes, few of its tokens are on their way at once: takes back what was booked for large chunks."""
        on_their_way = sequence.planned_computed - sequence.computed
        if sequence.narrowed or sequence.remaining > 1 or on_their_way > self.depth:
            return
        sequence.narrowed = True
        excess = self.blocks(sequence.known) - self._most(sequence.known, self.depth + 1)
        self._set(sequence, sequence.held, max(sequence.reserved - excess, self.most_held(sequence)))

    def _set(self, sequence: Sequence, held: int, reserved: int) -> None:
        self.promised += (reserved - held) - (sequence.reserved - sequence.held)
        sequence.held, sequence.reserved = held, reserved
        everything = reserved + self._left_behind(sequence.computed) if self._windows else reserved
        sequence.covered = everything // len(self.groups) * self.block_size

    def _next_change(self, computed: int) -> int:
        """How many computed tokens change what a sequence holds that has computed so many."""
        size = self.block_size
        change = -(-computed // size) * size + 1
        for window, _ in self._windows:
            change = min(change, (max(0, computed - window + 1) // size + 1) * size + window - 1)
        return change
