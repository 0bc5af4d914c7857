"""Linear layers, in the form that is fastest for the device and type."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own usage

Linear = Callable[[torch.Tensor], torch.Tensor]
# From a weight of [out, in] and a bias of [out], or none.
LinearMaker = Callable[[torch.Tensor, torch.Tensor | None], Linear]


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """[rows, in] → [rows, out], for a weight of [out, in].

    On CPUs weights are packed once in oneDNN's own order: a third to a half off a decode step, for else each call packs anew.
    """
    if weight.device.type == "cpu" and _can_pack(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return lambda rows: _packed_linear(rows, packed, bias)
    return lambda rows: F.linear(rows, weight, bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed_linear(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return out
