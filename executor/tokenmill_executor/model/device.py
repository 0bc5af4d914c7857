"""What the runner asks of its device: how long a forward pass took, and after an error whether it still lives."""

from __future__ import annotations

import time
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


def is_lost(device: torch.device) -> bool:
    """Whether a CUDA device's context is beyond use. One that is fails every later call, so a harmless one tells."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
