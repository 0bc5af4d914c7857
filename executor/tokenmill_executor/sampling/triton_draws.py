"""Draws in Triton, for CUDA: one kernel for all rows, which waits for nothing.

The rules are those of `draw`. In place of a sort it searches for the least logit that is kept, bit by bit: how many tokens, or how
much weight, lie within a distance of the largest logit only grows with the distance. Sums are float64 and in one order, so a row's
token does not hang on its batch. Exponentials differ from torch's in their last digits, and so may a draw once in a long time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from tokenmill_executor.runner import SamplingInput
from tokenmill_executor.sampling.choices import is_greedy
from tokenmill_executor.sampling.uniform import uniforms_of_steps
from tokenmill_executor.upload import upload

# Rows of the packed parameters.
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = (tl.constexpr(row) for row in range(4))
_NUM_PARAMS = 4
_LOG2_E = tl.constexpr(math.log2(math.e))
# A row is looked at some 70 times at most, by one multiprocessor: with many threads, which hide how far away it lies.
BLOCK, NUM_WARPS = 4096, 16


class TritonDraws:
    """See `Draws`."""

    def __init__(self, samples: Sequence[SamplingInput], steps: int, device: torch.device) -> None:
        self._packed: torch.Tensor | None = None
        if not all(is_greedy(sample.params) for sample in samples):
            self._packed = upload(np.concatenate([_packed_params(samples), uniforms_of_steps(samples, steps)]), device)

    def draw(self, step: int, logits: torch.Tensor, maxima: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return greedy
        tokens = torch.empty_like(greedy)
        rows, vocab_size = logits.shape
        draw_kernel[(rows,)](
            tokens,
            greedy,
            maxima,
            logits,
            self._packed,
            self._packed[_NUM_PARAMS + step],
            logits.stride(0),
            VOCAB_SIZE=vocab_size,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
            num_warps=NUM_WARPS,
        )
        return tokens


def _packed_params(samples: Sequence[SamplingInput]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[4, rows] float64, that hold all of float32 and int32. min_p is the bits of the distance that it stands for."""
    params = [sample.params for sample in samples]
    temperature = np.array([0.0 if is_greedy(param) else param.temperature for param in params], dtype=np.float32)
    min_p = np.array([param.min_p for param in params], dtype=np.float32)
    farthest = np.full_like(min_p, np.inf)
    cut = min_p > 0
    farthest[cut] = np.abs(np.log(min_p[cut])) * temperature[cut]
    top_k, top_p = [param.top_k for param in params], np.array([param.top_p for param in params], dtype=np.float32)
    return np.array([temperature, top_k, top_p, farthest.view(np.int32)], dtype=np.float64)


@triton.jit(do_not_specialize_on_alignment=["uniform"])
def draw_kernel(
    tokens,  # [rows] int64
    greedy,  # [rows] int64: the token where temperature is 0
    maxima,  # [rows] float32, of the logits
    logits,  # [rows, VOCAB_SIZE] float32
    packed,  # [4, rows] float64: see `_packed_params`; `params` is a name that Triton's own code around a kernel takes
    uniform,  # [rows] float64
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each row. One that is not all numbers keeps the token it has, which means nothing."""
    index, rows = tl.program_id(0), tl.num_programs(0)
    temperature = tl.load(packed + _TEMPERATURE * rows + index).to(tl.float32)
    token, largest = tl.load(greedy + index), tl.load(maxima + index)
    if (temperature > 0) & (tl.abs(largest) < float("inf")):
        row = logits + index.to(tl.int64) * logits_stride
        scale = _LOG2_E / temperature
        top_k = tl.load(packed + _TOP_K * rows + index)
        top_p = tl.load(packed + _TOP_P * rows + index)
        # Bits of the distance at which the last kept token lies. Those of infinity: all are kept.
        farthest = tl.full([], 0x7F800000, tl.int32)
        if (top_k > 0) & (top_k < VOCAB_SIZE):
            farthest = _search(row, largest, scale, farthest, top_k, True, VOCAB_SIZE, BLOCK)
        if top_p < 1:
            wanted = top_p * _sum_within(row, largest, scale, farthest, False, VOCAB_SIZE, BLOCK)
            farthest = _search(row, largest, scale, farthest, wanted, False, VOCAB_SIZE, BLOCK)
        farthest = tl.minimum(farthest, tl.load(packed + _MIN_P * rows + index).to(tl.int32))
        target = tl.load(uniform + index) * _sum_within(row, largest, scale, farthest, False, VOCAB_SIZE, BLOCK)
        token = _invert(row, largest, scale, farthest, target, VOCAB_SIZE, BLOCK).to(tl.int64)
    tl.store(tokens + index, token)


@triton.jit
def _distances(row, places, largest, VOCAB_SIZE: tl.constexpr):
    """How far logits lie below the largest: not negative, so that their bits compare as they do."""
    return largest - tl.load(row + places, mask=places < VOCAB_SIZE, other=float("-inf"))


@triton.jit
def _within(distances, farthest):
    return distances.to(tl.int32, bitcast=True) <= farthest


@triton.jit
def _weights_within(distances, scale, farthest):
    return tl.where(_within(distances, farthest), tl.exp2(-distances * scale), 0.0).to(tl.float64)


@triton.jit
def _sum_within(row, largest, scale, farthest, COUNT: tl.constexpr, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of the tokens within that distance, or how many they are; float64."""
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, VOCAB_SIZE, BLOCK):
        distances = _distances(row, start + tl.arange(0, BLOCK), largest, VOCAB_SIZE)
        if COUNT:
            sums += _within(distances, farthest).to(tl.float64)
        else:
            sums += _weights_within(distances, scale, farthest)
    return tl.sum(sums, 0)


@triton.jit
def _search(row, largest, scale, farthest, wanted, COUNT: tl.constexpr, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The least distance within which there is so much, `farthest` if there is none such: as bits, one of which a pass finds."""
    low, high = tl.full([], 0, tl.int32), farthest
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = _sum_within(row, largest, scale, middle, COUNT, VOCAB_SIZE, BLOCK) >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return high


@triton.jit
def _invert(row, largest, scale, farthest, target, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The first kept token up to which the weights exceed the target; by rounding there may be none, then the last one kept."""
    before = target * 0.0
    first, last = tl.full([], VOCAB_SIZE, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        places = start + tl.arange(0, BLOCK)
        weights = _weights_within(_distances(row, places, largest, VOCAB_SIZE), scale, farthest)
        up_to = before + tl.cumsum(weights, 0)
        first = tl.minimum(first, tl.min(tl.where((up_to > target) & (weights > 0), places, VOCAB_SIZE), 0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, places, 0), 0))
        before = tl.max(up_to, 0)
    return tl.where(first < VOCAB_SIZE, first, last)
