"""How many blocks of one executor can still be promised: a figure that is never higher than what is really free.

    free = available in the last result
         − blocks that the plans still out may take
         − blocks booked for admitted sequences and not planned yet

Both deductions are, for each sequence, `reserved − held`: what it may have after all that is promised, less what the last result
says it has. Blocks of a released or finished sequence become free when a result says so, never before.
Must not know: requests, plans, policies.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill_scheduler.core.sequence import Sequence


@dataclass(slots=True)
class Forecast:
    """`available` is as the last result reported it; `promised` is the sum of reserved − held over all sequences."""

    block_size: int
    available: int
    promised: int = 0

    @property
    def free(self) -> int:
        return self.available - self.promised

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def reserve(self, sequence: Sequence, blocks: int) -> None:
        """Promises a sequence `blocks` more; the caller has seen that they are free."""
        sequence.reserved += blocks
        self.promised += blocks

    def confirm(self, sequence: Sequence) -> None:
        """A result has come in: the sequence holds blocks for all it has computed."""
        held = self.blocks(sequence.computed)
        reserved = max(sequence.reserved, held)
        self.promised += (reserved - held) - (sequence.reserved - sequence.held)
        sequence.held, sequence.reserved = held, reserved

    def trim(self, sequence: Sequence) -> None:
        """The sequence will be planned no more: takes back what was booked beyond the plans that are out."""
        reserved = max(sequence.held, self.blocks(sequence.planned_computed))
        self.promised -= sequence.reserved - reserved
        sequence.reserved = reserved

    def forget(self, sequence: Sequence) -> None:
        """The executor has dropped the sequence, and the last result shows its blocks as available."""
        self.promised -= sequence.reserved - sequence.held
        sequence.held = sequence.reserved = 0
