"""Prefix caching: full blocks of K and V are found again by the hash of the tokens that lead to them.

A block's hash is chained: it covers its own token ids, the block before it, and a root made of the cache version (model, weights,
type of the cache) and the request's cache salt. So equal hashes mean equal contents. The scheduler computes the same hashes
(docs/plan-protocol.md has the definition). The idea is vLLM's automatic prefix caching; Kwon et al., "Efficient Memory Management
for Large Language Model Serving with PagedAttention", SOSP 2023.

Must not know: sequences, plans, tensors, reference counts.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice

from tokenmill_executor.host_tier import HostTier
from tokenmill_executor.records import PrefixChanges

HASH_ALGORITHMS = ("sha256", "xxhash")
# Of one message; an index that is larger is told over several.
MOST_TOLD = 65_536


def hash_function(algorithm: str) -> Callable[[bytes], bytes]:
    """Raises ModuleNotFoundError where the package `xxhash` is wanted and missing."""
    if algorithm == "sha256":
        return lambda data: hashlib.sha256(data).digest()
    import xxhash

    digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest
    return digest


@dataclass(frozen=True, slots=True)
class PrefixHasher:
    """How this executor hashes blocks."""

    digest: Callable[[bytes], bytes]
    version: str
    block_size: int

    def root(self, salt: str) -> bytes:
        """What the first block is chained to."""
        version = self.version.encode()
        return self.digest(len(version).to_bytes(4, "little") + version + salt.encode())

    def extend(self, digests: list[bytes], root: bytes, token_ids: SequenceOf[int], count: int) -> None:
        """Appends to the digests of the first blocks until there are `count`; `token_ids` has at least their tokens."""
        if count <= len(digests):
            return
        parent = digests[-1] if digests else root
        data = _little_endian(token_ids[len(digests) * self.block_size : count * self.block_size])
        for start in range(0, len(data), 4 * self.block_size):
            parent = self.digest(parent + data[start : start + 4 * self.block_size])
            digests.append(parent)


def _little_endian(token_ids: SequenceOf[int]) -> bytes:
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def short_hash(digest: bytes) -> int:
    """What the protocol tells of a digest."""
    return int.from_bytes(digest[:8], "big")


class PrefixIndex:
    """From digest to block, and an LRU of the indexed blocks that nobody references.

    With a `host` tier what is evicted moves there; it still counts as stored until that drops it. Changes gather until
    `take_changes`. `evictions` counts blocks that were taken for other use.
    """

    def __init__(self, host: HostTier | None = None) -> None:
        self._host = host
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, tuple[bytes, int]] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        self._stored: dict[int, int] = {}
        self._dropped: list[int] = []
        self.evictions = 0

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    @property
    def num_unreferenced(self) -> int:
        return len(self._unreferenced)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest chain from the first digest on."""
        blocks = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def store(self, block: int, digest: bytes, parent: bytes | None) -> int:
        """Indexes a referenced block; returns the one that stands for this digest, another if that was indexed before."""
        known = self._blocks.setdefault(digest, block)
        if known == block and block not in self._digests:
            above = 0 if parent is None else short_hash(parent)
            self._digests[block] = (digest, above)
            if self._host is None or not self._host.forget(digest):
                self._stored[short_hash(digest)] = above
        return known

    def bring_back(self, block: int, digest: bytes, parent: int) -> None:
        """Indexes a referenced block that comes from the host tier; `parent` is the hash of the block before it."""
        self._blocks[digest] = block
        self._digests[block] = (digest, parent)

    def reference(self, block: int) -> None:
        """Somebody holds it again."""
        self._unreferenced.pop(block, None)

    def unreference(self, block: int) -> None:
        """Nobody holds it any more: it can be evicted after all that were let go before it."""
        self._unreferenced[block] = None

    def evict(self) -> int:
        """Gives up the block that has been unreferenced longest, and returns it for other use."""
        block, _ = self._unreferenced.popitem(last=False)
        self.evictions += 1
        digest, parent = self._digests.pop(block)
        del self._blocks[digest]
        gone = digest if self._host is None else self._host.keep(block, digest, parent)
        if gone is not None:
            told = short_hash(gone)
            # One that was never told needs no word.
            if self._stored.pop(told, None) is None:
                self._dropped.append(told)
        return block

    def tell_all(self) -> None:
        """A new scheduler knows nothing: all that is indexed counts as stored just now, each block after its parent."""
        self._dropped = []
        self._stored = {short_hash(digest): parent for digest, parent in self._everything()}

    def take_changes(self) -> PrefixChanges:
        """What has changed since the last time, the stored ones beyond MOST_TOLD left for the next."""
        dropped, self._dropped = tuple(self._dropped), []
        if not self._stored:
            return PrefixChanges(dropped)
        stored = dict(islice(self._stored.items(), MOST_TOLD))
        self._stored = dict(islice(self._stored.items(), MOST_TOLD, None))
        return PrefixChanges(dropped, tuple(stored), tuple(stored.values()))

    def _everything(self) -> Iterator[tuple[bytes, int]]:
        """Digests with the hash of the block before, on the device and then in the host tier; that one comes first."""
        yield from self._digests.values()
        if self._host is not None:
            yield from self._host.items()

    def check(self, references: SequenceOf[int]) -> None:
        """Raises AssertionError unless the index agrees with itself and with the reference counts, and every parent outlives its
        blocks. O(blocks)."""
        indexed: set[int] = set()
        for digest, parent in self._everything():
            assert parent == 0 or parent in indexed, "a block is indexed and its parent is not"
            assert short_hash(digest) not in indexed, "a block is indexed on the device and in the host tier"
            indexed.add(short_hash(digest))
        assert self._blocks == {digest: block for block, (digest, _) in self._digests.items()}, "digests and blocks disagree"
        unreferenced = [block for block in self._digests if references[block] == 0]
        assert sorted(self._unreferenced) == sorted(unreferenced), "the LRU is not the indexed blocks without references"
        turn = {short_hash(self._digests[block][0]): place for place, block in enumerate(self._unreferenced)}
        for block, (digest, parent) in self._digests.items():
            if references[block]:
                assert parent not in turn, "a block is held and its parent is not"
            elif parent in turn:
                assert turn[short_hash(digest)] < turn[parent], "a parent would be evicted before its block"
