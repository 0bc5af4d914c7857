"""Linear layers of 8 bits against float32."""

from __future__ import annotations

import pytest
import torch
from tokenmill_executor.model.config import ModelError
from tokenmill_executor.model.quantized_linear import QUANTIZED_LINEARS, quantize

# Of the size of such products: e4m3 has three bits behind the first, int8 seven in all, over a row of random numbers.
TOLERANCE = {"fp8": 0.04, "int8": 0.015}
KINDS = list(TOLERANCE)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 7, 31, 32, 33, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_product_is_near_float32(kind: str, count: int, biased: bool) -> None:
    weight, rows, bias = random(48, 64), random(count, 64, seed=1).bfloat16(), random(48, seed=2).bfloat16() if biased else None
    # Rows and outputs of very different sizes: each has its own scale.
    weight[3] *= 1000
    rows[count // 2] *= 0.001
    found = QUANTIZED_LINEARS[kind](weight.bfloat16(), bias)(rows)
    expected = torch.nn.functional.linear(rows.float(), weight, None if bias is None else bias.float())
    assert found.dtype == torch.bfloat16
    sizes = rows.float().norm(dim=1, keepdim=True) * weight.norm(dim=1)[None]
    rounding = 2**-8 * expected.abs()
    assert torch.all((found.float() - expected).abs() <= TOLERANCE[kind] * sizes + rounding)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_that_is_not_a_number_gives_none_and_harms_no_other(kind: str, poison: float) -> None:
    rows = torch.ones((5, 64), dtype=torch.bfloat16)
    rows[2, 9] = poison
    found = QUANTIZED_LINEARS[kind](torch.ones((16, 64), dtype=torch.bfloat16), None)(rows)
    assert not torch.isfinite(found[2]).any()
    assert torch.isfinite(found[torch.arange(5) != 2]).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_rows_of_zeros_stay_zeros(dtype: torch.dtype) -> None:
    codes, scales = quantize(torch.zeros((2, 16)), dtype)
    assert not codes.float().any()
    assert not scales.any()


@pytest.mark.parametrize("kind", KINDS)
def test_sides_that_cannot_be_had_are_refused(kind: str) -> None:
    with pytest.raises(ModelError, match="multiples of 16"):
        QUANTIZED_LINEARS[kind](random(48, 40), None)
