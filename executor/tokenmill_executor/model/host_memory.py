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

from tokenmill_executor.runner import DeviceLost
from tokenmill_executor.upload import integers

# Gathered at once on the device: enough that a copy is bound by bandwidth, and little beside a cache.
_STAGING_BYTES = 64 << 20


def trim() -> None:
    """Gives what has been freed back to the system: after many small pieces the C library keeps tens of MiB for more of them."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if malloc_trim is not None:
        malloc_trim(0)


class TorchHostMemory:
    """`storage` is the cache: tensors whose first dimension is the block, on one device. Raises MemoryError."""

    def __init__(self, storage: SequenceOf[torch.Tensor], num_slots: int, device: torch.device) -> None:
        self._device = device
        self._parts = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in storage]
        size = sum(part.shape[1] for part in self._parts)
        try:
            self._slots = torch.empty((num_slots, size), dtype=torch.uint8, pin_memory=device.type == "cuda")
        except RuntimeError as error:
            raise MemoryError(f"{num_slots * size} bytes of host memory cannot be had: {error}") from error
        rows = min(num_slots, max(1, _STAGING_BYTES // size))
        self._staging = torch.empty((rows, size), dtype=torch.uint8, device=device)
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
                self._slots[slot].copy_(staging[row], non_blocking=True)

    def _copy_in(self, slots: SequenceOf[int], blocks: SequenceOf[int]) -> None:
        with self._timeline.copies(len(blocks)):
            places, staging = integers(blocks, self._device), self._staging[: len(blocks)]
            for row, slot in enumerate(slots):
                staging[row].copy_(self._slots[slot], non_blocking=True)
            for part, columns in zip(self._parts, self._columns(staging), strict=True):
                part.index_copy_(0, places, columns)
            self._timeline.let_steps_go_on()

    def _columns(self, staging: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each tensor of the cache its bytes in every row."""
        return torch.split(staging, [part.shape[1] for part in self._parts], dim=1)


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
