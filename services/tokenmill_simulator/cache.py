"""The KV blocks of a model executor: counts of what sequences hold, and a prefix cache of whole prompt blocks.

A cached block is known by its hash. One that nobody uses stays until its room is needed; of those, the one let go first leaves
first, and of one sequence the last block before the first, so that what is left of a chain is always a first part. Where there is
room in host memory, what leaves the device goes there, and leaves it in the same order. Must not know: plans, time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from tokenmill_scheduler.core.plans import Blocks


class BlockCache:
    """`private` blocks belong to one sequence and are only counted; a cached one has `users`, which may be none.

    A hash is cached on the device or in the host's memory, never in both.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.private = 0
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()
        self._stored: list[int] = []
        self._dropped: list[int] = []

    @property
    def available(self) -> int:
        return self.num_blocks - self.private - len(self._users) + len(self._idle)

    def blocks(self) -> Blocks:
        held = self.private + len(self._users) - len(self._idle)
        return Blocks(self.num_blocks - held - len(self._idle), len(self._idle), held)

    def pin(self, hashes: Sequence[int]) -> int:
        """Takes the longest first part of `hashes` that the device has; returns its length."""
        users = self._users
        for count, block in enumerate(hashes):
            if block not in users:
                return count
            if users[block] == 0:
                del self._idle[block]
            users[block] += 1
        return len(hashes)

    def bring_back(self, hashes: Iterable[int]) -> int:
        """Takes the longest first part of `hashes` that the host has, if there are blocks for it; returns its length."""
        found = list(takewhile(self._host.__contains__, hashes))
        if len(found) > self.available:
            return 0
        for block in found:
            del self._host[block]
        self.take(len(found))
        self.private -= len(found)
        self._users.update(dict.fromkeys(found, 1))
        return len(found)

    def take(self, count: int) -> None:
        """`count` blocks for one sequence; the caller has seen that so many are available."""
        for _ in range(count - (self.num_blocks - self.private - len(self._users))):
            block, _ = self._idle.popitem(last=False)
            del self._users[block]
            self._host[block] = None
        while len(self._host) > self.num_host_blocks:
            self._dropped.append(self._host.popitem(last=False)[0])
        self.private += count

    def keep(self, hashes: Sequence[int]) -> list[int]:
        """Blocks of one sequence that are full now; returns those that are shared from here on, for it to let go at its end.

        Of two sequences that compute the same block at the same time, the first one's is kept.
        """
        new = [block for block in hashes if block not in self._users]
        for block in new:
            self._users[block] = 1
            self._host.pop(block, None)
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
        dropped = tuple([block for block in dict.fromkeys(self._dropped) if not self._is_cached(block)])
        stored = tuple([block for block in dict.fromkeys(self._stored) if self._is_cached(block)])
        self._stored, self._dropped = [], []
        return dropped, stored

    def _is_cached(self, block: int) -> bool:
        return block in self._users or block in self._host
