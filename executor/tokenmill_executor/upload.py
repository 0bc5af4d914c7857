"""Host arrays to a device without waiting for it: what a step needs goes up while earlier work still runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """On a CPU a view of `array`; else a copy, queued behind the work the device has.

    Goes through pinned memory, which torch keeps until the copy is done: from any other the driver may wait for the device first.
    """
    host = torch.from_numpy(array)
    if device.type != "cuda" or not array.size:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def integers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64."""
    return upload(np.array(values, dtype=np.int64), device)


def floats(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """float32."""
    return upload(np.array(values, dtype=np.float32), device)
