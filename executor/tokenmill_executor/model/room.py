"""Weights that a GPU has no room for: one sentence for the operator, of how much they need, how much there is and what to change.

Must not know: how weights are loaded, what comes after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenmill_executor.model.config import ModelError
from tokenmill_executor.model.device import first_line, is_out_of_memory
from tokenmill_executor.model.quantized_linear import QUANTIZED_LINEARS
from tokenmill_executor.model.weights import Checkpoint, expected_names


@contextmanager
def telling_whether_weights_fit(
    checkpoint: Checkpoint, dtype: torch.dtype, quantization: str | None, device: torch.device
) -> Iterator[None]:
    """Around their loading. Raises ModelError where the device has no room for them."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        kind = quantization or str(dtype).removeprefix("torch.")
        raise ModelError(
            f"The weights need about {_gib(weight_bytes(checkpoint, dtype, quantization))} in {kind}, and {device} has "
            f"{_gib(device_bytes(device))} in all; choose {_smaller(dtype, quantization)}a smaller model or another device: "
            f"{first_line(error)}"
        ) from error


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, quantization: str | None) -> int:
    """Of all weights in `dtype`; where they are quantised, of layers' projections a byte each. Reads nothing but shapes."""
    return sum(
        checkpoint.tensors.rows(name).shape.numel() * (1 if quantization and name.endswith("_proj.weight") else dtype.itemsize)
        for name in expected_names(checkpoint.config)
    )


def device_bytes(device: torch.device) -> int:
    """That a GPU has, in use or not: what is free cannot be asked of one that has no room for a context."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total


def _smaller(dtype: torch.dtype, quantization: str | None) -> str:
    if quantization is not None:
        return ""
    return "the dtype bfloat16, " if dtype == torch.float32 else f"the quantization {' or '.join(sorted(QUANTIZED_LINEARS))}, "


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
