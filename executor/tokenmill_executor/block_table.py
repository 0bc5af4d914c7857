"""The table that maps a sequence's positions to its KV blocks, with a row for each group of layers (see `BlockGroup`).

Must not know: who else has a block, what is in it. A block is a number.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from tokenmill_executor.runner import Int32Array


class BlockTable:
    """The blocks of one sequence: block i of a group holds positions i * block_size to (i + 1) * block_size - 1.

    `gaps` has for each group the first block that its window has left behind and the one after the last; 0 stands in their places.
    """

    __slots__ = ("_rows", "count", "gaps")

    def __init__(self, num_groups: int = 1) -> None:
        self._rows = np.zeros((num_groups, 8), dtype=np.int32)
        self.count = 0
        self.gaps = [(0, 0)] * num_groups

    @property
    def blocks(self) -> Int32Array:
        """[count], those of the first group, a view that is good until the table changes."""
        return self._rows[0, : self.count]

    @property
    def rows(self) -> Int32Array:
        """[groups, count], a view that is good until the table changes."""
        return self._rows[:, : self.count]

    def extend(self, blocks: SequenceOf[int]) -> None:
        """By equally many blocks of each group, those of the first group first."""
        groups, capacity = self._rows.shape
        end = self.count + len(blocks) // groups
        if end > capacity:
            grown = np.zeros((groups, max(end, 2 * capacity)), dtype=np.int32)
            grown[:, : self.count] = self.rows
            self._rows = grown
        self._rows[:, self.count : end] = np.reshape(blocks, (groups, -1))
        self.count = end

    def replace(self, index: int, block: int) -> None:
        """Of the first group."""
        self._rows[0, index] = block

    def leave_behind(self, group: int, sinks: int, end: int) -> list[int]:
        """Gives up the blocks of a group before `end`, but for the first `sinks`; returns those of them that it still had."""
        row = self._rows[group, max(sinks, self.gaps[group][1]) : end]
        held: list[int] = row.tolist()
        row[:] = 0
        self.gaps[group] = (sinks, end)
        return held

    def held(self) -> list[int]:
        """All that the table has a reference to."""
        blocks: list[int] = []
        for row, (start, end) in zip(self.rows.tolist(), self.gaps, strict=True):
            blocks += row[:start] + row[end:]
        return blocks

    def cut(self, count: int) -> list[int]:
        """Gives up the blocks behind the first `count` of each group, fewer than there are; none of them has a window left behind.

        Returns them.
        """
        given_up: list[int] = self._rows[:, count : self.count].ravel().tolist()
        self.count = count
        return given_up

    def clear(self) -> list[int]:
        """Empties the table and returns what it held."""
        held = self.held()
        self.count = 0
        self.gaps = [(0, 0)] * len(self.gaps)
        return held
