"""Prefixes that running sequences are on the way to compute: who begins alike waits for these blocks, rather than compute them too.

So of a burst of requests with one long beginning, one computes it, and the others their own ends. (SGLang does it too, by putting
such requests back in its queue.) Must not know: queues, policies, plans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from tokenmill_scheduler.core.sequence import Sequence

# Tokens: to wait for fewer saves less than the step that they are waited for costs.
LEAST_SHARED = 128


class ComingBlocks:
    """Of one executor: the hashes of blocks that a running sequence is to compute and no result has told of yet."""

    def __init__(self) -> None:
        self._by_hash: dict[int, Sequence] = {}
        self._by_sequence: dict[int, SequenceOf[int]] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def find(self, hashes: SequenceOf[int], start: int, most: int) -> tuple[Sequence, int] | None:
        """The longest first part of `hashes` that is coming, beyond `start`, up to `most`: who computes its end, and its length."""
        by_hash = self._by_hash
        end = bisect_left(range(most), True, lo=start, key=lambda place: hashes[place] not in by_hash)
        return (by_hash[hashes[end - 1]], end) if end > start else None

    def add(self, sequence: Sequence, hashes: SequenceOf[int]) -> None:
        """It is to compute these blocks, but for those that another is at already."""
        self._by_sequence[sequence.sequence_id] = hashes
        for block_hash in hashes:
            self._by_hash.setdefault(block_hash, sequence)

    def arrived(self, hashes: Iterable[int]) -> None:
        """They are in the cache."""
        for block_hash in hashes:
            self._by_hash.pop(block_hash, None)

    def remove(self, sequence: Sequence) -> None:
        """It computes nothing any more."""
        for block_hash in self._by_sequence.pop(sequence.sequence_id, ()):
            if self._by_hash.get(block_hash) is sequence:
                del self._by_hash[block_hash]

    def clear(self) -> None:
        self._by_hash.clear()
        self._by_sequence.clear()

    def check(self, running: Iterable[int]) -> None:
        """Raises AssertionError if a sequence that does not run has blocks coming."""
        assert self._by_sequence.keys() <= set(running), "blocks are to come of a sequence that has left"
        assert {s.sequence_id for s in self._by_hash.values()} <= self._by_sequence.keys()
