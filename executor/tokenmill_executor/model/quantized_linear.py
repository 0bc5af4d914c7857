"""Linear layers whose weights have 8 bits, fp8 or int8, on torch's matrix products, which are cuBLAS's on CUDA.

A weight has a scale for each output, and each row of activations one of its own, measured as it comes (vLLM's dynamic, per-token
quantisation). The same functions run on a CPU, for tests; what is fast there are the C++ kernels. Must not know: layers, models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own usage

from tokenmill_executor.model.config import ModelError
from tokenmill_executor.model.linear import Linear, LinearMaker

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# What cuBLAS asks of a matrix's sides, and of the rows of an int8 product.
_MULTIPLE = 16
_LEAST_INT8_ROWS = 32


def fp8_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """[rows, in] → [rows, out] in the rows' type, for a weight of [out, in]. Raises ModelError for sizes that cannot be had."""
    codes, scales = _quantized_weight(weight, torch.float8_e4m3fn)

    def linear(rows: torch.Tensor) -> torch.Tensor:
        row_codes, row_scales = quantize(rows, torch.float8_e4m3fn)
        product: torch.Tensor = torch._scaled_mm(
            row_codes, codes.t(), scale_a=row_scales, scale_b=scales.t(), bias=bias, out_dtype=rows.dtype
        )
        return product

    return linear


def int8_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """As `fp8_linear`."""
    codes, scales = _quantized_weight(weight, torch.int8)

    def linear(rows: torch.Tensor) -> torch.Tensor:
        row_codes, row_scales = quantize(rows, torch.int8)
        missing = max(_LEAST_INT8_ROWS - len(rows), -len(rows) % 8)
        sums = torch._int_mm(F.pad(row_codes, (0, 0, 0, missing)), codes.t())[: len(rows)]
        product = (sums.float() * row_scales * scales.t()).to(rows.dtype)
        return product if bias is None else product + bias

    return linear


QUANTIZED_LINEARS: dict[str, LinearMaker] = {"fp8": fp8_linear, "int8": int8_linear}


def quantize(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, n] → codes [rows, n] and scales [rows, 1] float32; a row that is not all numbers has such a scale."""
    values = rows.float()
    scales = values.abs().amax(1, keepdim=True) / _LARGEST[dtype]
    codes = values / torch.where(scales == 0, 1.0, scales)
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scales


def _quantized_weight(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if any(side % _MULTIPLE for side in weight.shape):
        raise ModelError(f"A weight of {tuple(weight.shape)} cannot be quantised: its sides are to be multiples of {_MULTIPLE}.")
    return quantize(weight, dtype)
