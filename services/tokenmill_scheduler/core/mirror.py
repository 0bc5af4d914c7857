"""What an executor's prefix cache holds, as its results tell it: to foretell how much of a request need not be computed.

A block is known by a hash chained over all tokens up to its end, as docs/plan-protocol.md defines it. A prediction can be wrong,
for the cache goes on changing: plans are made so that they stay right then, only less good. Must not know: queues, plans, policies.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill_scheduler.core.live import LiveRequest


class BlockHashes:
    """The hashes of a request's first full blocks, each computed once, when it is first asked for."""

    def __init__(self, version: str, salt: str, block_size: int) -> None:
        name = version.encode()
        self._last = sha256(len(name).to_bytes(4, "little") + name + salt.encode()).digest()
        self._block_bytes = 4 * block_size
        self._block_size = block_size
        self._hashes = array("Q")

    def first(self, count: int, tokens: Sequence[int]) -> Sequence[int]:
        """At least `count` hashes; `tokens` has the tokens of so many blocks."""
        known = len(self._hashes)
        if known < count:
            self._extend(tokens[known * self._block_size : count * self._block_size])
        return self._hashes

    def _extend(self, tokens: Sequence[int]) -> None:
        words = array("I", tokens)
        if sys.byteorder == "big":
            words.byteswap()
        data = words.tobytes()
        for start in range(0, len(data), self._block_bytes):
            self._last = sha256(self._last + data[start : start + self._block_bytes]).digest()
            self._hashes.append(int.from_bytes(self._last[:8], "big"))


class Mirror:
    """Of one executor in one epoch; at most `most` hashes. `version` None: it has no cache, or hashes in a way not known here.

    An executor evicts a block only after all that follow it, so what it holds of a chain is always a first part.
    """

    def __init__(self, version: str | None, block_size: int, most: int) -> None:
        self._version = version
        self._block_size = block_size
        self._most = most
        self._stored: set[int] = set()

    def __len__(self) -> int:
        return len(self._stored)

    def apply(self, dropped: Iterable[int], stored: Iterable[int]) -> None:
        """What a result tells, in this order."""
        self._stored.difference_update(dropped)
        for block_hash in stored:
            if len(self._stored) < self._most:
                self._stored.add(block_hash)

    def clear(self) -> None:
        self._stored.clear()

    def prepare(self, live: LiveRequest) -> None:
        """Computes the hashes of the prompt, so that no plan has to wait for that."""
        if self._version is not None:
            self.hashes(live, len(live.request.prompt) // self._block_size)

    def hit(self, live: LiveRequest) -> int:
        """Known tokens of a request that are expected in the cache: whole blocks, and never the last token, which is computed."""
        most = (live.known - 1) // self._block_size
        if self._version is None or not self._stored or most == 0:
            return 0
        hashes, stored = self.hashes(live, most), self._stored
        return self._block_size * bisect_left(range(most), True, key=lambda place: hashes[place] not in stored)

    def hashes(self, live: LiveRequest, count: int) -> Sequence[int]:
        """At least the first `count` of a request's known tokens; none without a cache."""
        if self._version is None:
            return ()
        way = (self._version, self._block_size)
        if way not in live.hashes:
            live.hashes[way] = BlockHashes(self._version, live.request.cache_salt, self._block_size)
        prompt = live.request.prompt
        tokens = prompt if count * self._block_size <= len(prompt) else (*prompt, *live.output)
        return live.hashes[way].first(count, tokens)
