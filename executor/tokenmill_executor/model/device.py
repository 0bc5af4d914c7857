"""What the runner asks of its device: how long a pass took, what it has computed, and after an error whether it still lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch


class StepClock(Protocol):
    def mark(self) -> object:
        """A point in the work handed out so far."""

    def seconds(self, begin: object, end: object) -> float:
        """Between two marks. Waits until the second is reached."""


class HostClock:
    """For a CPU, where a call returns when its work is done."""

    def mark(self) -> object:
        return time.perf_counter()

    def seconds(self, begin: object, end: object) -> float:
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin


class CudaClock:
    """Marks are events in the current stream, so that the host does not wait in mid-step."""

    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: object, end: object) -> float:
        assert isinstance(begin, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Download(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> torch.Tensor:
        """Returns it once it is there, on the host."""


# Has a tensor come down as it is behind the work handed out so far; does not wait for it.
Fetch = Callable[[torch.Tensor], Download]


class HostDownload:
    """For a CPU: the tensor itself, which nobody may change before it is looked at."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor


class CudaDownload:
    """Through pinned memory, to which the device writes by itself.

    Each has memory of its own: torch keeps a few pinned pieces and gives one out again only when its copy is done.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def wait(self) -> torch.Tensor:
        self._arrived.synchronize()
        return self._host


def is_lost(device: torch.device) -> bool:
    """Whether a CUDA device's context is beyond use. One that is fails every later call, so a harmless one tells."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left: torch's allocator has an error of its own, the driver, cuBLAS and Triton have words."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))


def first_line(error: BaseException) -> str:
    """Torch adds advice to CUDA's errors, for those who debug kernels."""
    return (str(error).splitlines() or [type(error).__name__])[0]
