"""The model executor's blocks, with or without a prefix cache: written from the plan protocol alone, with the plainest means.

A cached block is known by all tokens up to its end. Blocks that nobody uses are evicted in the order in which they were let go.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill_scheduler.core.mirror import BlockHashes
from tokenmill_scheduler.core.plans import Blocks, ExecutorDescription

Key = tuple[int, ...]


# In a sequence's blocks: one that its window has left behind.
GONE = -1


class Pool:
    def __init__(self, description: ExecutorDescription) -> None:
        self.size = description.block_size
        self.caching = description.caches_prefixes
        self.version = description.cache_version or ""
        self.users = [0] * description.num_blocks
        self.free = list(range(description.num_blocks))
        self.idle: list[int] = []
        self.keys: dict[int, Key] = {}
        self.stored: list[int] = []
        self.dropped: list[int] = []

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def hit(self, tokens: Sequence[int]) -> list[int]:
        """Takes the blocks of the longest cached prefix that leaves a token to compute."""
        blocks: list[int] = []
        by_key = {key: block for block, key in self.keys.items()}
        while self.caching and (end := (len(blocks) + 1) * self.size) < len(tokens) and tuple(tokens[:end]) in by_key:
            blocks.append(by_key[tuple(tokens[:end])])
        for block in blocks:
            if self.users[block] == 0:
                self.idle.remove(block)
            self.users[block] += 1
        return blocks

    def use(self, blocks: Sequence[int]) -> None:
        """Blocks that somebody uses get another user."""
        for block in blocks:
            assert self.users[block] > 0
            self.users[block] += 1

    def take(self, count: int) -> list[int]:
        blocks = [self.free.pop() if self.free else self._evict() for _ in range(count)]
        for block in blocks:
            self.users[block] += 1
        return blocks

    def _evict(self) -> int:
        block = self.idle.pop(0)
        self.dropped.append(self._hash(self.keys.pop(block)))
        return block

    def let_go(self, blocks: Sequence[int]) -> None:
        for block in reversed([block for block in blocks if block != GONE]):
            self.users[block] -= 1
            if self.users[block] == 0:
                (self.idle if block in self.keys else self.free).append(block)

    def keep(self, blocks: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        """Positions `start` to `end` - 1 have been computed: what they fill can be hit, but for what is cached already."""
        for place in range(start // self.size, end // self.size) if self.caching else ():
            key = tuple(tokens[: (place + 1) * self.size])
            if key not in self.keys.values():
                self.keys[blocks[place]] = key
                self.stored.append(self._hash(key))

    def all_stored(self) -> tuple[int, ...]:
        return tuple(map(self._hash, self.keys.values()))

    def changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What has left and what has entered since the last time, by what is there now."""
        now = set(self.all_stored())
        dropped = tuple(h for h in dict.fromkeys(self.dropped) if h not in now)
        stored = tuple(h for h in dict.fromkeys(self.stored) if h in now)
        self.stored, self.dropped = [], []
        return dropped, stored

    def blocks(self, tables: Sequence[Sequence[int]]) -> Blocks:
        users = [0] * len(self.users)
        for table in [[block for block in table if block != GONE] for table in tables]:
            assert len(set(table)) == len(table)
            for block in table:
                users[block] += 1
        assert users == self.users, "a block is lost or has an owner too many"
        unused = [block for block, count in enumerate(users) if count == 0]
        assert sorted(self.free + self.idle) == unused
        return Blocks(len(self.free), len(self.idle), len(users) - len(unused))

    def _hash(self, key: Key) -> int:
        count = len(key) // self.size
        return BlockHashes(self.version, "", self.size).first(count, key)[count - 1]
