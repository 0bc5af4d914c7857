"""Host memory for evicted KV blocks: a slot holds the bytes of one block, those of all layers side by side.

On CUDA it is pinned and the copies run on a stream of their own: steps wait only until what leaves has been gathered, and for what
comes back; the way to the host goes on beside them. On a CPU "host memory" is more of the same, and copies are done at once.

Must not know: what a block holds, why it is moved.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any

import torch

from tokenmill_executor.model.memory import physical_bytes
from tokenmill_executor.runner import DeviceLost
from tokenmill_executor.upload import integers

# Gathered at once on the device: enough that a copy is bound by bandwidth, and little beside a cache.
_STAGING_BYTES = 64 << 20
# Of one piece: torch rounds pinned memory up to a power of two, which of tens of GB may be half as much again.
_PIECE_BYTES = 1 << 30


def trim() -> None:
    """Gives what has been freed back to the system: after many small pieces the C library keeps tens of MiB for more of them."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if malloc_trim is not None:
        malloc_trim(0)


class TorchHostMemory:
    """`storage` is the cache: tensors whose first dimension is the block, on one device. Raises MemoryError."""

    def __init__(self, storage: SequenceOf[torch.Tensor], num_slots: int, device: torch.device) -> None:
        self._device = device
        self._parts = _as_integers(storage)
        width = sum(part.shape[1] for part in self._parts)
        kind = self._parts[0].dtype
        size = width * kind.itemsize
        self._slots_of_piece = _slots_of_piece(num_slots, size, device)
        try:
            self._pieces = [
                torch.empty((min(self._slots_of_piece, num_slots - start), width), dtype=kind, pin_memory=device.type == "cuda")
                for start in range(0, num_slots, self._slots_of_piece)
            ]
        except RuntimeError as error:
            raise MemoryError(f"{num_slots * size} bytes of host memory cannot be had: {error}") from error
        rows = min(num_slots, max(1, _STAGING_BYTES // size))
        self._staging = torch.empty((rows, width), dtype=kind, device=device)
        self._timeline: _HostTimeline | _CudaTimeline = _CudaTimeline(device) if device.type == "cuda" else _HostTimeline()

    def copy_out(self, blocks: SequenceOf[int], slots: SequenceOf[int]) -> None:
        with _whole_or_lost():
            for start in range(0, len(blocks), len(self._staging)):
                self._copy_out(blocks[start : start + len(self._staging)], slots[start : start + len(self._staging)])

    def copy_in(self, slots: SequenceOf[int], blocks: SequenceOf[int]) -> None:
        with _whole_or_lost():
            for start in range(0, len(blocks), len(self._staging)):
                self._copy_in(slots[start : start + len(self._staging)], blocks[start : start + len(self._staging)])

    def take_measured(self) -> tuple[int, float]:
        return self._timeline.take()

    def _copy_out(self, blocks: SequenceOf[int], slots: SequenceOf[int]) -> None:
        with self._timeline.copies(len(blocks)):
            places, staging = integers(blocks, self._device), self._staging[: len(blocks)]
            for part, columns in zip(self._parts, self._columns(staging), strict=True):
                columns.copy_(part.index_select(0, places))
            # From here on a step may write to the blocks.
            self._timeline.let_steps_go_on()
            for row, slot in enumerate(slots):
                self._slot(slot).copy_(staging[row], non_blocking=True)

    def _copy_in(self, slots: SequenceOf[int], blocks: SequenceOf[int]) -> None:
        with self._timeline.copies(len(blocks)):
            places, staging = integers(blocks, self._device), self._staging[: len(blocks)]
            for row, slot in enumerate(slots):
                staging[row].copy_(self._slot(slot), non_blocking=True)
            for part, columns in zip(self._parts, self._columns(staging), strict=True):
                part.index_copy_(0, places, columns)
            self._timeline.let_steps_go_on()

    def _slot(self, slot: int) -> torch.Tensor:
        return self._pieces[slot // self._slots_of_piece][slot % self._slots_of_piece]

    def _columns(self, staging: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each tensor of the cache its part of every row."""
        return torch.split(staging, [part.shape[1] for part in self._parts], dim=1)


def _as_integers(storage: SequenceOf[torch.Tensor]) -> list[torch.Tensor]:
    """What blocks hold, [num_blocks, ...] each, as rows of the widest integers that all have in whole numbers.

    A device that copies eight bytes at a time takes an eighth of the instructions.
    """
    rows = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in storage]
    whole = all(row.shape[1] % torch.int64.itemsize == 0 for row in rows)
    return [row.view(torch.int64) for row in rows] if whole else rows


def _slots_of_piece(num_slots: int, size_bytes: int, device: torch.device) -> int:
    """How many slots to allocate at once. Raises MemoryError before it pins all that the machine has."""
    if device.type != "cuda":
        return num_slots
    if num_slots * size_bytes > physical_bytes():
        raise MemoryError(f"{num_slots * size_bytes} bytes of host memory are more than the machine has")
    return max(1, _PIECE_BYTES // size_bytes)


@contextmanager
def _whole_or_lost() -> Iterator[None]:
    """Blocks are indexed before they are copied: after a copy that failed the cache could not be trusted."""
    try:
        yield
    except Exception as error:
        raise DeviceLost(f"a copy between KV cache and host memory failed: {error}") from error


class _HostTimeline:
    """A copy is done when its call returns."""

    def __init__(self) -> None:
        self._blocks = 0
        self._seconds = 0.0

    @contextmanager
    def copies(self, num_blocks: int) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self._blocks += num_blocks
        self._seconds += time.perf_counter() - started_s

    def let_steps_go_on(self) -> None:
        """They do."""

    def take(self) -> tuple[int, float]:
        taken = self._blocks, self._seconds
        self._blocks, self._seconds = 0, 0.0
        return taken


class _CudaTimeline:
    """Copies run one after another on a stream of their own, behind the steps asked for before them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._steps = torch.cuda.current_stream(device)
        # Begin and end of each run of copies, and its blocks; looked at when they are over.
        self._running: deque[tuple[Any, Any, int]] = deque()

    @contextmanager
    def copies(self, num_blocks: int) -> Iterator[None]:
        self._steps = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(self._steps)
        with torch.cuda.stream(self._stream):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
        self._running.append((begin, end, num_blocks))

    def let_steps_go_on(self) -> None:
        """Those asked for from now on wait for what the stream has been given so far."""
        self._steps.wait_stream(self._stream)

    def take(self) -> tuple[int, float]:
        blocks, seconds = 0, 0.0
        while self._running and self._running[0][1].query():
            begin, end, count = self._running.popleft()
            blocks, seconds = blocks + count, seconds + begin.elapsed_time(end) / 1e3
        return blocks, seconds
