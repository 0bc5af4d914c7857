"""Draws of the Triton kernel against torch's: the same tokens, truncated or not, with ties, and over several blocks of a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenmill_executor.model.cuda import cuda_draws
from tokenmill_executor.runner import SamplingInput, SamplingParams
from tokenmill_executor.sampling import TorchDraws
from tokenmill_executor.sampling.triton_draws import TritonDraws

CPU = torch.device("cpu")
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.2},
    {"top_k": 1},
    {"top_k": 7, "temperature": 0.7},
    {"top_k": 10_000},
    {"top_p": 0.9, "temperature": 1.3},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01, "temperature": 2.0},
]


def samples_of(*params: dict[str, Any]) -> list[SamplingInput]:
    return [SamplingInput(row, [1] * 5, 5, SamplingParams(9, seed=row - 3, **given)) for row, given in enumerate(params)]


def drawn(samples: list[SamplingInput], logits: torch.Tensor, steps: int = 1) -> list[tuple[list[int], list[int]]]:
    """Of each step torch's tokens and the kernel's."""
    maxima, greedy = logits.max(dim=-1)
    both = [make(samples, steps, CPU) for make in (TorchDraws, TritonDraws)]
    found = [[draws.draw(step, logits, maxima, greedy).tolist() for draws in both] for step in range(steps)]
    return [(expected, got) for expected, got in found]


@pytest.mark.parametrize("tied", [False, True], ids=["all unlike", "many alike"])
def test_rows_of_all_kinds_beside_each_other(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_executor.sampling.triton_draws.BLOCK", 128)
    logits = 3 * torch.randn(len(PARAMS), 200, generator=torch.Generator().manual_seed(4))
    ((expected, got),) = drawn(samples_of(*PARAMS), logits.mul(2).round().div(2) if tied else logits)
    assert got == expected
    assert expected[1:] != logits[1:].argmax(-1).tolist()


def test_each_step_has_numbers_of_its_own() -> None:
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(5))
    steps = drawn(samples_of(*[{"temperature": 1.5}] * 4), logits, steps=3)
    assert all(got == expected for expected, got in steps)
    assert len({tuple(got) for _, got in steps}) == 3


def test_rows_that_are_no_numbers_get_some_token_and_spoil_no_other() -> None:
    """By the largest logit it is told that it means nothing, but the next step looks it up."""
    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(6))
    samples = samples_of(*[{"top_p": 0.9}] * 3)
    ((expected, alone),) = drawn(samples, logits)
    assert alone == expected
    logits[0], logits[2, 7] = torch.nan, torch.inf
    ((_, beside),) = drawn(samples, logits)
    assert beside[1] == alone[1]
    assert all(0 <= token < 90 for token in beside)


def test_greedy_rows_alone_need_no_kernel() -> None:
    ((_, tokens),) = drawn(samples_of({"temperature": 0.0}), torch.tensor([[1.0, 3.0, 2.0]]))
    assert tokens == [1]


def test_where_all_is_to_be_torch_the_draws_are_too() -> None:
    samples = samples_of({"top_p": 0.5})
    assert [type(cuda_draws(backend)(samples, 1, CPU)) for backend in ("auto", "flashinfer", "reference")] == [
        TritonDraws,
        TritonDraws,
        TorchDraws,
    ]
