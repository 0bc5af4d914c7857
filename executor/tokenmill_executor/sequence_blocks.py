"""The blocks of sequences: which are shared or brought back when one begins, taken before a step writes to them, kept after it.

Must not know: plans, runners, what a fault does to its sequence. Of a sequence, `computed`, `digests` and `table` are written here.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from tokenmill_executor.block_table import BlockTable
from tokenmill_executor.blocks import BlockPool
from tokenmill_executor.host_tier import HostTier
from tokenmill_executor.prefix import PrefixHasher
from tokenmill_executor.records import Blocks, Fault, PrefixChanges, SequenceFault
from tokenmill_executor.sequences import Sequence


class SequenceBlocks:
    """Without a `hasher` no prefix is cached; with a `host` tier, evicted blocks move there."""

    def __init__(self, pool: BlockPool, hasher: PrefixHasher | None, host: HostTier | None) -> None:
        self.pool = pool
        self.host = host
        self._hasher = hasher

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    def counts(self) -> Blocks:
        return self.pool.counts()

    def take_changes(self) -> PrefixChanges:
        """Of what is cached, since the last time."""
        return self.pool.index.take_changes()

    def new_table(self) -> BlockTable:
        """An empty one."""
        return self.pool.new_table()

    def root(self, cache_salt: str) -> bytes:
        """What the digests of a sequence with this salt begin with."""
        return b"" if self._hasher is None else self._hasher.root(cache_salt)

    def share(self, sequence: Sequence, fork_of: Sequence | None) -> int:
        """Before its first step: takes the blocks that are there of all tokens but the last, whose logits are wanted.

        Returns the tokens they hold; they count as computed once the step succeeds. `give_back` undoes it.
        """
        if self._hasher is None:
            return 0 if fork_of is None else self._share_prompt(sequence, fork_of)
        most = (len(sequence.token_ids) - 1) // self.block_size
        self._hasher.extend(sequence.digests, sequence.root, sequence.token_ids, most)
        return self.pool.share(sequence.table, sequence.digests[:most]) * self.block_size

    def _share_prompt(self, sequence: Sequence, other: Sequence) -> int:
        """Where no prefix is cached, the blocks of the sequence that it is a fork of.

        The rest, at most a block of tokens, is computed anew rather than copied: that needs no copy of blocks on any device, and is
        the same arithmetic as without a fork.
        """
        count = min(sequence.sampling.num_prompt_tokens, len(sequence.token_ids) - 1, other.computed) // self.block_size
        end = count * self.block_size
        if other.token_ids[:end] != sequence.token_ids[:end]:
            return 0
        return self.pool.fork(sequence.table, other.table, count) * self.block_size

    def worth_bringing_back(self, sequence: Sequence) -> int:
        """Blocks of the host tier that follow those it shares, and that are copied sooner than computed anew."""
        if self.host is None:
            return 0
        most = (len(sequence.token_ids) - 1) // self.block_size
        return self.host.worth_bringing_back(sequence.digests[sequence.table.count : most])

    def take(self, sequence: Sequence, end: int, kept: int = 0) -> Fault | None:
        """Those up to position `end`, the first `kept` of them from the host tier; all, or none and why."""
        table = sequence.table
        if end <= table.count * self.block_size:
            return None
        known = len(sequence.token_ids)
        needed = self.pool.least_for(known)
        if needed > self.pool.num_blocks:
            detail = f"{known} tokens need {needed} blocks, there are {self.pool.num_blocks}"
            return Fault(sequence.sequence_id, SequenceFault.TOO_LONG, detail)
        if not self.pool.can_allocate(table, end):
            missing = self.pool.missing(table, end)
            return Fault(sequence.sequence_id, SequenceFault.NO_BLOCKS, f"{missing} more blocks are wanted, too few are free")
        if kept:
            self.pool.bring_back(table, sequence.digests[table.count : table.count + kept])
        self.pool.allocate(table, end)
        return None

    def take_for_all(self, ends: SequenceOf[tuple[Sequence, int]]) -> bool:
        """Those of several sequences, each up to its position; of all, or of none. `keep` gives back what was not written to."""
        for place, (sequence, end) in enumerate(ends):
            if not self.pool.can_allocate(sequence.table, end):
                for earlier, _ in ends[:place]:
                    self.pool.trim(earlier.table, len(earlier.token_ids))
                return False
            self.pool.allocate(sequence.table, end)
        return True

    def make_room(self) -> None:
        """What was evicted for blocks that the next step writes to moves to the host tier, before it does."""
        if self.host is not None:
            self.host.flush()

    def keep(self, sequence: Sequence, start: int, end: int) -> None:
        """Positions `start` to `end` - 1 are computed: full blocks can be shared now, those beyond go back."""
        sequence.computed = end
        self.pool.trim(sequence.table, end)
        first, last = start // self.block_size, end // self.block_size
        if self._hasher is not None and first < last:
            self._hasher.extend(sequence.digests, sequence.root, sequence.token_ids, last)
            self.pool.store(sequence.table, sequence.digests, first, last)
        # Plans are carried out one after another: the next one begins here, and nothing that runs sees what lies behind.
        if self.pool.slides:
            self.pool.slide(sequence.table, end)

    def give_back(self, sequence: Sequence) -> None:
        """All of them, at once: plans are carried out one after another, so no step that runs can still use them."""
        self.pool.release(sequence.table)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless blocks and references agree with all sequences there are. O(blocks)."""
        self.pool.check([sequence.table for sequence in sequences])
