"""The fused operations against torch's."""

from __future__ import annotations

import pytest
import torch
from tokenmill_executor.model.ops import TorchOps
from tokenmill_executor.model.triton_ops import TritonOps

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dtypes
def test_rms_norm_of_rows_and_of_heads_within_a_row(dtype: torch.dtype) -> None:
    rows, weight = random(5, 100, dtype=dtype), random(100, dtype=dtype, seed=1)
    close(TritonOps().rms_norm(rows, weight, 1e-5), TorchOps().rms_norm(rows, weight, 1e-5))
    _, heads = torch.split(random(3, 9, 80, dtype=dtype), [5, 4], dim=1)
    weight = random(80, dtype=dtype, seed=1)
    close(TritonOps().rms_norm(heads, weight, 1e-6), TorchOps().rms_norm(heads, weight, 1e-6))


@dtypes
def test_add_rms_norm_gives_the_sum_and_its_norm(dtype: torch.dtype) -> None:
    hidden, update, weight = (random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(4, 72), (4, 72), (72,)]))
    expected = TorchOps().add_rms_norm(hidden, update, weight, 1e-5)
    for got, wanted in zip(TritonOps().add_rms_norm(hidden.clone(), update, weight, 1e-5), expected, strict=True):
        close(got, wanted)


@dtypes
def test_rotate_turns_queries_and_keys_and_leaves_values(dtype: torch.dtype) -> None:
    heads = random(6, 9, 80, dtype=dtype)
    cos, sin = (random(6, 1, 40, dtype=dtype, seed=seed) for seed in (1, 2))
    query, key, value = torch.split(heads, [5, 2, 2], dim=1)
    expected, before = TorchOps().rotate(query, key, cos, sin), value.clone()
    for got, wanted in zip(TritonOps().rotate(query, key, cos, sin), expected, strict=True):
        close(got, wanted)
    assert torch.equal(value, before)


@dtypes
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * 1100, dtype=dtype)
    close(TritonOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_no_number_stays_none() -> None:
    rows = torch.ones(3, 32)
    rows[1, 5], rows[2, 5] = torch.inf, torch.nan
    normed = TritonOps().rms_norm(rows, torch.ones(32), 1e-5)
    assert normed.isnan().any(dim=1).tolist() == [False, True, True]
