"""A second tier of the prefix cache in host memory: blocks that are evicted from the device's pool move there and can come back.

A preempted sequence's blocks go the same way, so it resumes by swap, or by recomputation where that is cheaper: what copies and
steps have taken so far tells. Both are as old as PagedAttention (Kwon et al., SOSP 2023); vLLM calls such a tier KV offloading.

A block is indexed in one place, on the device or here. Copies are queued while a plan's blocks are taken, and carried out before
its step in the order they were asked for, so that a block or a slot can be used again at once.

Must not know: sequences, plans, tensors (`HostMemory` does), what the device's index holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from tokenmill_executor.runner import HostMemory

# Of one more measurement, beside all before it.
_WEIGHT = 0.1


@dataclass(slots=True)
class Rate:
    """Seconds that one of something takes: a mean in which older measurements count less, and larger ones more."""

    _count: float = 0.0
    _seconds: float = 0.0

    def add(self, count: int, seconds: float) -> None:
        self._count += _WEIGHT * (count - self._count)
        self._seconds += _WEIGHT * (seconds - self._seconds)

    @property
    def seconds_each(self) -> float | None:
        """None before anything was measured."""
        return self._seconds / self._count if self._count else None


@dataclass(slots=True)
class _Copies:
    """A run of copies in one direction, each by its target: of two to the same one, the later stands for both."""

    to_host: bool
    sources: dict[int, int] = field(default_factory=dict)


class HostTier:
    """From digest to slot, and an LRU of all of them: none is in use, so any can be dropped.

    `copied_out` and `copied_in` count blocks that moved, `dropped` those that left the cache from here. May be read on any thread.
    """

    def __init__(self, memory: HostMemory, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a host tier needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.copied_out = 0
        self.copied_in = 0
        self.dropped = 0
        self._memory = memory
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        # Slot, and the hash of the block before it. Tails of chains are evicted first, so they come first and are dropped first.
        self._entries: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._queue: list[_Copies] = []
        self._copy = Rate()
        self._compute = Rate()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Digest and the hash of the block before it; each comes after that one if it is here, too."""
        return ((digest, parent) for digest, (_, parent) in reversed(self._entries.items()))

    # ---- blocks come and go ----------------------------------------------------------------------------------------------------

    def keep(self, block: int, digest: bytes, parent: int) -> bytes | None:
        """Moves an evicted block here. Returns the digest that leaves the cache for it, if no slot is free: the oldest."""
        gone = None
        if not self._free:
            self.dropped += 1
            if not self._entries:
                return digest  # every slot is being read for blocks on their way back
            gone, (slot, _) = self._entries.popitem(last=False)
            self._free.append(slot)
        slot = self._free.pop()
        self._entries[digest] = slot, parent
        self.copied_out += 1
        self._run(to_host=True).sources[slot] = block
        return gone

    def take(self, digests: SequenceOf[bytes]) -> list[tuple[int, int]]:
        """Takes blocks out of the index: slot and hash of the block before, each. `bring_back` follows."""
        return [self._entries.pop(digest) for digest in digests]

    def bring_back(self, slots: SequenceOf[int], blocks: SequenceOf[int]) -> None:
        """Copies what was taken to these blocks; then the slots are free."""
        self.copied_in += len(slots)
        self._run(to_host=False).sources.update(zip(blocks, slots, strict=True))
        self._free += slots

    def forget(self, digest: bytes) -> bool:
        """The device has computed the block anew. Says whether it was here."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self._free.append(entry[0])
        return entry is not None

    def _run(self, *, to_host: bool) -> _Copies:
        if not self._queue or self._queue[-1].to_host != to_host:
            self._queue.append(_Copies(to_host))
        return self._queue[-1]

    def flush(self) -> None:
        """Has the queued copies carried out, or begun: what comes next on the device comes behind them."""
        queue, self._queue = self._queue, []
        for copies in queue:
            targets, sources = list(copies.sources), list(copies.sources.values())
            if copies.to_host:
                self._memory.copy_out(sources, targets)
            else:
                self._memory.copy_in(sources, targets)

    # ---- swap or recompute -----------------------------------------------------------------------------------------------------

    def worth_bringing_back(self, digests: SequenceOf[bytes]) -> int:
        """Of a chain of digests, how many of its first are to be copied back rather than computed: all that are here, or none."""
        count = 0
        while count < len(digests) and digests[count] in self._entries:
            count += 1
        return count if count and self._copying_is_cheaper() else 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """What computing so many tokens of prompts took."""
        self._compute.add(num_tokens, seconds)

    def _copying_is_cheaper(self) -> bool:
        """A copy is measured in either direction, so a low estimate mends itself: blocks are copied out whatever it says."""
        blocks, seconds = self._memory.take_measured()
        if blocks:
            self._copy.add(blocks, seconds)
        copy_s, compute_s = self._copy.seconds_each, self._compute.seconds_each
        return copy_s is None or compute_s is None or copy_s < compute_s * self._block_size

    def check(self) -> None:
        """Raises AssertionError unless every slot is free or holds one block, and nothing waits to be copied. O(slots)."""
        assert not self._queue, "copies were asked for and not made"
        slots = [slot for slot, _ in self._entries.values()]
        assert sorted(self._free + slots) == list(range(self.num_blocks)), "a slot of the host tier is lost, or doubled"
