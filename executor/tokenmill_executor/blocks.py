"""The pool of KV blocks, and the table that maps a sequence's positions to its blocks.

Must not know: sequences, plans, tensors. A block is a number below `num_blocks`; who holds a block holds a reference to it.
"""

from __future__ import annotations

import numpy as np

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

    def clear(self) -> list[int]:
        """Empties the table and returns what it held."""
        held: list[int] = self.blocks.tolist()
        self.count = 0
        return held


class BlockPool:
    """Hands out blocks and takes them back, counting references.

    Callers speak of tables and numbers of tokens only, never of single blocks, so that blocks shared by a prefix stay the pool's
    own affair.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block dropped last is taken first, its memory most likely still in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether `table` can be made to cover the first `num_tokens` positions."""
        return self.blocks_for(num_tokens) - table.count <= len(self._free)

    def allocate(self, table: BlockTable, num_tokens: int) -> None:
        """Makes `table` cover the first `num_tokens` positions. The caller has asked `can_allocate`."""
        assert self.can_allocate(table, num_tokens), "allocate without can_allocate"
        missing = self.blocks_for(num_tokens) - table.count
        if missing <= 0:
            return
        taken = self._free[-missing:][::-1]
        del self._free[-missing:]
        for block in taken:
            self._references[block] += 1
        table.extend(taken)

    def release(self, table: BlockTable) -> None:
        """Drops the table's references, and empties it. A second release of it does nothing."""
        # Last block first: what is dropped last is taken first, and a prefix is worth more than its tail.
        for block in reversed(table.clear()):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def counts(self) -> Blocks:
        """O(1). No block is cached as long as there is no prefix index."""
        free = len(self._free)
        return Blocks(free=free, cached=0, held=self.num_blocks - free)

    def check(self, tables: list[BlockTable]) -> None:
        """Raises AssertionError unless the counts agree with `tables`, all those that hold blocks. O(blocks): for idle times."""
        references = [0] * self.num_blocks
        for table in tables:
            for block in table.blocks:
                references[int(block)] += 1
        assert references == self._references, "reference counts disagree with the tables"
        unreferenced = [block for block, count in enumerate(references) if count == 0]
        assert sorted(self._free) == unreferenced, "the free list is not the unreferenced blocks"
