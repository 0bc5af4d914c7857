"""The pool of KV blocks: who has which, and which can be shared.

Layers may be of several groups (see `BlockGroup`), all drawn from the one pool. Where a group has a window, the blocks that it
leaves behind go back to the pool, all but those of the sinks.

A full block that is computed can be indexed by its digest, and is then shared, by reference, with every sequence whose tokens
begin alike. It is never written again: a sequence writes only behind its last full block, in blocks it alone holds. So sharing
never needs a copy on write. An indexed block that nobody references stays as it is until its memory is wanted.

Must not know: sequences, plans, tensors. A block is a number below `num_blocks`; who holds a block holds a reference to it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from tokenmill_executor.block_table import BlockTable
from tokenmill_executor.host_tier import HostTier
from tokenmill_executor.prefix import PrefixIndex
from tokenmill_executor.records import Blocks
from tokenmill_executor.runner import ONE_GROUP, BlockGroup


class BlockPool:
    """Hands out blocks and takes them back, counting references.

    Callers speak of tables, digests and numbers of tokens, never of single blocks, so that sharing stays the pool's own affair.
    With a `host` tier, evicted blocks move there.
    """

    def __init__(
        self, num_blocks: int, block_size: int, groups: SequenceOf[BlockGroup] = ONE_GROUP, host: HostTier | None = None
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_groups = len(groups)
        self._groups = tuple(groups)
        # The groups with a window, each with its number and the blocks of its sinks.
        self._sliding = [(g, i, g.sink_blocks(block_size)) for i, g in enumerate(groups) if g.sliding_window is not None]
        # A stack: the block dropped last is taken first, its memory most likely still in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._host = host
        self.index = PrefixIndex(host)

    @property
    def slides(self) -> bool:
        """Whether any group has a window."""
        return bool(self._sliding)

    def new_table(self) -> BlockTable:
        """An empty one."""
        return BlockTable(self.num_groups)

    def least_for(self, num_tokens: int) -> int:
        """Blocks without which so many tokens cannot be computed, not even one by one."""
        return sum(group.most_blocks(num_tokens, 1, self.block_size) for group in self._groups)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that `table` lacks to cover the first `num_tokens` positions; not above 0 if it covers them."""
        return self.num_groups * (-(-num_tokens // self.block_size) - table.count)

    def can_allocate(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether `table` can be made to cover the first `num_tokens` positions."""
        return self.missing(table, num_tokens) <= len(self._free) + self.index.num_unreferenced

    def share(self, table: BlockTable, digests: SequenceOf[bytes]) -> int:
        """Gives an empty table the blocks of the longest indexed chain of `digests`, and returns how many. `release` undoes it."""
        assert table.count == 0, "a prefix begins a table"
        blocks = self.index.find(digests)
        for block in blocks:
            if self._references[block] == 0:
                self.index.reference(block)
            self._references[block] += 1
        table.extend(blocks)
        return len(blocks)

    def fork(self, table: BlockTable, other: BlockTable, count: int) -> int:
        """Gives an empty table the first `count` blocks of another, full and computed, by reference; `release` undoes it.

        Returns how many: none when a window has left blocks behind, which the new table may still need.
        """
        assert table.count == 0, "a fork begins a table"
        if any(start != end for start, end in other.gaps):
            return 0
        blocks: list[int] = other.rows[:, :count].ravel().tolist()
        for block in blocks:
            self._references[block] += 1
        table.extend(blocks)
        return count

    def store(self, table: BlockTable, digests: SequenceOf[bytes], start: int, end: int) -> None:
        """Indexes blocks `start` to `end` - 1 of a table, which are full and computed; `digests` are those of its first blocks.

        Where a chain was computed twice at once, the table takes the block indexed first, which holds the same: so one copy stays,
        and whoever holds a block holds its parent in the index.
        """
        for place in range(start, end):
            own = int(table.blocks[place])
            known = self.index.store(own, digests[place], digests[place - 1] if place else None)
            if known != own:
                if self._references[known] == 0:
                    self.index.reference(known)
                self._references[known] += 1
                table.replace(place, known)
                self._let_go(own)

    def allocate(self, table: BlockTable, num_tokens: int) -> None:
        """Makes `table` cover the first `num_tokens` positions. The caller has asked `can_allocate`."""
        assert self.can_allocate(table, num_tokens), "allocate without can_allocate"
        missing = self.missing(table, num_tokens)
        if missing <= 0:
            return
        table.extend(self._take(missing))

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Takes back what `table` has beyond the first `num_tokens` positions, to which nothing was written."""
        needed = -(-num_tokens // self.block_size)
        if needed < table.count:
            for block in reversed(table.cut(needed)):
                self._let_go(block)

    def _take(self, count: int) -> list[int]:
        """Free ones first, whatever is cached is worth more; then those that have been of no use for longest."""
        from_free = min(count, len(self._free))
        taken = [self._free.pop() for _ in range(from_free)]
        taken += [self.index.evict() for _ in range(count - from_free)]
        for block in taken:
            self._references[block] += 1
        return taken

    def bring_back(self, table: BlockTable, digests: SequenceOf[bytes]) -> None:
        """Extends a table by blocks that the host tier has. The caller has asked `can_allocate` for all that it is to cover."""
        assert self._host is not None, "there is no host tier"
        # Out of there first: taking blocks for them moves others to it.
        kept = self._host.take(digests)
        blocks = self._take(len(digests))
        self._host.bring_back([slot for slot, _ in kept], blocks)
        for block, digest, (_, parent) in zip(blocks, digests, kept, strict=True):
            self.index.bring_back(block, digest, parent)
        table.extend(blocks)

    def slide(self, table: BlockTable, computed: int) -> None:
        """Takes back what no query at position `computed` or later can see any more."""
        for group, row, sinks in self._sliding:
            end = group.first_needed(computed, self.block_size)
            if end > max(sinks, table.gaps[row][1]):
                for block in table.leave_behind(row, sinks, end):
                    self._let_go(block)

    def release(self, table: BlockTable) -> None:
        """Drops the table's references, and empties it. A second release of it does nothing."""
        # Last block first: a prefix is worth more than its tail, so the tail is evicted first.
        for block in reversed(table.clear()):
            self._let_go(block)

    def _let_go(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self.index:
            self.index.unreference(block)
        else:
            self._free.append(block)

    def counts(self) -> Blocks:
        """O(1)."""
        free, cached = len(self._free), self.index.num_unreferenced
        return Blocks(free=free, cached=cached, held=self.num_blocks - free - cached)

    def check(self, tables: list[BlockTable]) -> None:
        """Raises AssertionError unless the counts agree with `tables`, all those that hold blocks. O(blocks): for idle times."""
        references = [0] * self.num_blocks
        for table in tables:
            for block in table.held():
                references[block] += 1
        assert references == self._references, "reference counts disagree with the tables"
        self.index.check(references)
        if self._host is not None:
            self._host.check()
        unreferenced = [block for block, count in enumerate(references) if count == 0 and block not in self.index]
        assert sorted(self._free) == unreferenced, "the free list is not the unreferenced blocks that are not cached"
