"""The pool of KV blocks, and the table that maps a sequence's positions to its blocks.

A full block that is computed can be indexed by its digest, and is then shared, by reference, with every sequence whose tokens
begin alike. It is never written again: a sequence writes only behind its last full block, in blocks it alone holds. So sharing
never needs a copy on write. An indexed block that nobody references stays as it is until its memory is wanted.

Must not know: sequences, plans, tensors. A block is a number below `num_blocks`; who holds a block holds a reference to it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from tokenmill_executor.prefix import PrefixIndex
from tokenmill_executor.records import Blocks
from tokenmill_executor.runner import Int32Array


class BlockTable:
    """The blocks of one sequence: block i holds positions i * block_size to (i + 1) * block_size - 1."""

    __slots__ = ("_blocks", "count")

    def __init__(self) -> None:
        self._blocks = np.zeros(8, dtype=np.int32)
        self.count = 0

    @property
    def blocks(self) -> Int32Array:
        """[count], a view that is good until the table changes."""
        return self._blocks[: self.count]

    def extend(self, blocks: list[int]) -> None:
        end = self.count + len(blocks)
        if end > len(self._blocks):
            grown = np.zeros(max(end, 2 * len(self._blocks)), dtype=np.int32)
            grown[: self.count] = self.blocks
            self._blocks = grown
        self._blocks[self.count : end] = blocks
        self.count = end

    def replace(self, index: int, block: int) -> None:
        self._blocks[index] = block

    def clear(self) -> list[int]:
        """Empties the table and returns what it held."""
        held: list[int] = self.blocks.tolist()
        self.count = 0
        return held


class BlockPool:
    """Hands out blocks and takes them back, counting references.

    Callers speak of tables, digests and numbers of tokens, never of single blocks, so that sharing stays the pool's own affair.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block dropped last is taken first, its memory most likely still in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self.index = PrefixIndex()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether `table` can be made to cover the first `num_tokens` positions."""
        return self.blocks_for(num_tokens) - table.count <= len(self._free) + self.index.num_unreferenced

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
        missing = self.blocks_for(num_tokens) - table.count
        if missing <= 0:
            return
        # Free ones first, whatever is cached is worth more; then those that have been of no use for longest.
        from_free = min(missing, len(self._free))
        taken = [self._free.pop() for _ in range(from_free)]
        taken += [self.index.evict() for _ in range(missing - from_free)]
        for block in taken:
            self._references[block] += 1
        table.extend(taken)

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
            for block in table.blocks:
                references[int(block)] += 1
        assert references == self._references, "reference counts disagree with the tables"
        self.index.check(references)
        unreferenced = [block for block, count in enumerate(references) if count == 0 and block not in self.index]
        assert sorted(self._free) == unreferenced, "the free list is not the unreferenced blocks that are not cached"
