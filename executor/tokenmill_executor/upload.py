"""Host arrays to a device without waiting for it: what a step needs goes up while earlier work still runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """On a CPU a view of `array`; else a copy, queued behind the work the device has."""
    return stage(array, device).to(device, non_blocking=True)


def upload_into(target: torch.Tensor, array: npt.NDArray[np.generic]) -> None:
    """As `upload`, to a place that is there already."""
    target.copy_(stage(array, target.device), non_blocking=True)


def stage(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """For CUDA in pinned memory, which torch keeps until the copy is done: from any other the driver may wait for the device."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" and array.size else host


def integers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64."""
    return upload(np.array(values, dtype=np.int64), device)


def floats(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """float32."""
    return upload(np.array(values, dtype=np.float32), device)
