"""The KV blocks of a model executor: counts of what sequences hold, and a prefix cache of whole prompt blocks.

A cached block is known by its hash. One that nobody uses stays until its room is needed; of those, the one let go first leaves
first, and of one sequence the last block before the first, so that what is left of a chain is always a first part.
Must not know: plans, time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tokenmill_scheduler.core.records import Blocks


class BlockCache:
    """`private` blocks belong to one sequence and are only counted; a cached one has `users`, which may be none."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.private = 0
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._stored: list[int] = []
        self._dropped: list[int] = []

    @property
    def available(self) -> int:
        return self.num_blocks - self.private - len(self._users) + len(self._idle)

    def blocks(self) -> Blocks:
        held = self.private + len(self._users) - len(self._idle)
        return Blocks(self.num_blocks - held - len(self._idle), len(self._idle), held)

    def pin(self, hashes: Sequence[int]) -> int:
        """Takes the longest cached first part of `hashes`; returns its length."""
        users = self._users
        for count, block in enumerate(hashes):
            if block not in users:
                return count
            if users[block] == 0:
                del self._idle[block]
            users[block] += 1
        return len(hashes)

    def take(self, count: int) -> None:
        """`count` blocks for one sequence; the caller has seen that so many are available."""
        for _ in range(count - (self.num_blocks - self.private - len(self._users))):
            block, _ = self._idle.popitem(last=False)
            del self._users[block]
            self._dropped.append(block)
        self.private += count

    def keep(self, hashes: Sequence[int]) -> list[int]:
        """Blocks of one sequence that are full now; returns those that are shared from here on, for it to let go at its end.

        Of two sequences that compute the same block at the same time, the first one's is kept.
        """
        new = [block for block in hashes if block not in self._users]
        for block in new:
            self._users[block] = 1
        self._stored += new
        self.private -= len(new)
        return new

    def let_go(self, private: int, shared: Sequence[int]) -> None:
        self.private -= private
        for block in reversed(shared):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._idle[block] = None

    def changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What has left and what has entered since the last time, by what is there now."""
        if not self._stored and not self._dropped:
            return (), ()
        users = self._users
        dropped = tuple([block for block in dict.fromkeys(self._dropped) if block not in users])
        stored = tuple([block for block in dict.fromkeys(self._stored) if block in users])
        self._stored, self._dropped = [], []
        return dropped, stored
