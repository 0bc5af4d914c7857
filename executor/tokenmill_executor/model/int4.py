"""Weights as 4-bit codes: groups of 32 along a row, each with a scale and a minimum in half precision (ggml's Q4_0 and Q4_1).

A weight is its group's scale * code + minimum, codes 0 to 15. Must not know: files' headers, kernels' order of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

GROUP = 32
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """`codes` is [rows, depth] uint8; `scales` and `minima` are [rows, depth / 32] float16."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, rows: slice) -> Int4Rows:
        return Int4Rows(self.codes[rows], self.scales[rows], self.minima[rows])

    @staticmethod
    def combine(how: Callable[[list[torch.Tensor]], torch.Tensor], rows: Sequence[Int4Rows]) -> Int4Rows:
        """As `how` combines the rows of each part."""
        parts = ([one.codes for one in rows], [one.scales for one in rows], [one.minima for one in rows])
        return Int4Rows(*(how(part) for part in parts))

    def dequantize(self) -> torch.Tensor:
        """[rows, depth] float32."""
        values = self.codes.view(len(self.codes), -1, GROUP).float()
        return values.mul_(self.scales.float()[..., None]).add_(self.minima.float()[..., None]).flatten(1)


def quantize(weight: torch.Tensor) -> Int4Rows:
    """[rows, depth] to the codes nearest to it: a group's smallest weight has code 0, its largest 15, as in Q4_1."""
    groups = weight.float().view(len(weight), -1, GROUP)
    minima = groups.amin(2).half()
    scales = ((groups.amax(2) - minima.float()) / 15).half()
    steps = torch.where(scales > 0, scales, 1.0).float()[..., None]
    codes = ((groups - minima.float()[..., None]) / steps).round_().clamp_(0, 15)
    return Int4Rows(codes.to(torch.uint8).flatten(1), scales, minima)


def from_q4_0(blocks: torch.Tensor) -> Int4Rows:
    """[rows, depth / 32 * 18] bytes: each block its scale, then 16 bytes of codes; a weight is scale * (code - 8)."""
    cut = blocks.view(len(blocks), -1, _HALF_BYTES + GROUP // 2)
    scales = _halves(cut[..., :2])
    return Int4Rows(_codes(cut[..., 2:]), scales, scales * -8)


def from_q4_1(blocks: torch.Tensor) -> Int4Rows:
    """[rows, depth / 32 * 20] bytes: each block its scale, its minimum, then 16 bytes of codes."""
    cut = blocks.view(len(blocks), -1, 2 * _HALF_BYTES + GROUP // 2)
    return Int4Rows(_codes(cut[..., 4:]), _halves(cut[..., :2]), _halves(cut[..., 2:4]))


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    return pairs.contiguous().view(torch.float16)[..., 0]


def _codes(packed: torch.Tensor) -> torch.Tensor:
    """The low halves of a block's bytes are its first 16 codes."""
    codes = packed.new_empty((*packed.shape[:2], GROUP))
    torch.bitwise_and(packed, 15, out=codes[..., : GROUP // 2])
    torch.bitwise_right_shift(packed, 4, out=codes[..., GROUP // 2 :])
    return codes.flatten(1)
