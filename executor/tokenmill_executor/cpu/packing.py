"""Weights in the order that the kernels read them, panels of columns (see csrc/kernels.h), packed once when a model is loaded.

Must not know: layers' names, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tokenmill_executor.cpu.library import GROUP_SIZE, INT4_GROUP_SIZE, MATRIX_KINDS, Matrix
from tokenmill_executor.cpu.memory import HugeArena, padded_bytes
from tokenmill_executor.model.int4 import Int4Rows, quantize
from tokenmill_executor.model.tensors import Rows

_DATA_TYPES = {"bfloat16": torch.bfloat16, "int8": torch.uint8, "int4": torch.uint8}
_PER_LANE = {"bfloat16": 2, "int8": 4}
_DEPTH_STEP = {"bfloat16": 2, "int8": GROUP_SIZE, "int4": GROUP_SIZE}
# Of a matrix in float32, read at once: little beside the whole of it, and it stays in the cache until it is packed.
_SLICE_BYTES = 1 << 20

# Rows as numbers, or as 4-bit codes.
Part = torch.Tensor | Int4Rows
Weight = Rows[Part]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The record that kernels take, and what keeps its memory alive."""

    record: Matrix
    kept: tuple[torch.Tensor, ...]


def packed_bytes(columns: int, depth: int, kind: str, panel: int) -> int:
    """What one weight takes of the arena, its scales and bias apart."""
    return padded_bytes(_packed_shape(columns, depth, kind, panel), _DATA_TYPES[kind])


def pack(weight: Weight, bias: torch.Tensor | None, kind: str, panel: int, arena: HugeArena) -> PackedMatrix:
    """A weight of [columns, depth] and a bias of [columns], as `kind`, in panels of the width of an instruction set.

    For int4 the codes that there are, or the nearest ones. Raises ValueError for a depth that cannot be packed.
    """
    columns, depth = weight.shape
    if depth % _DEPTH_STEP[kind]:
        raise ValueError(f"{kind} weights of depth {depth} cannot be packed")
    data = arena.take(_packed_shape(columns, depth, kind, panel), _DATA_TYPES[kind])
    # Those beyond the last column stay 0, and so do their scales.
    scales = _padded(torch.zeros(columns), panel) if kind == "int8" else None
    for rows in slices(columns, depth, panel):
        part, panels = weight[rows], data[rows.start // panel : -(-rows.stop // panel)]
        if kind == "int4":
            _fill_int4(panels, _as_codes(part), panel)
            continue
        assert isinstance(part, torch.Tensor)
        if scales is not None:
            codes, scales[rows] = quantize_rows(part)
            # Plus 128 as unsigned bytes.
            part = codes.view(torch.uint8) ^ 0x80
        _fill_panels(panels, part, panel)
    padded_bias = None if bias is None else _padded(bias, panel)
    record = Matrix(
        data.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        0 if padded_bias is None else padded_bias.data_ptr(),
        columns,
        depth,
        MATRIX_KINDS[kind],
    )
    return PackedMatrix(record, tuple(x for x in (data, scales, padded_bias) if x is not None))


def slices(columns: int, depth: int, panel: int) -> Iterator[slice]:
    """Of whole panels."""
    step = max(1, _SLICE_BYTES // (4 * depth * panel)) * panel
    return (slice(start, min(start + step, columns)) for start in range(0, columns, step))


def _fill_int4(data: torch.Tensor, rows: Int4Rows, panel: int) -> None:
    panels, groups, _ = data.shape
    halves = 2 * panel
    for start, part in ((0, rows.scales), (halves, rows.minima)):
        by_panel = _whole_panels(part, panel).view(panels, panel, groups).transpose(1, 2).contiguous()
        data[..., start : start + halves] = by_panel.view(torch.uint8)
    # Sixteen depths in the low halves of bytes, the next sixteen in the high ones.
    codes = _whole_panels(rows.codes, panel).view(panels, panel, groups, 2, INT4_GROUP_SIZE // 8, 4)
    packed = codes[:, :, :, 0] | codes[:, :, :, 1] << 4
    data[..., 2 * halves :] = packed.permute(0, 2, 3, 1, 4).reshape(panels, groups, -1)


def _whole_panels(rows: torch.Tensor, panel: int) -> torch.Tensor:
    """With rows of zeros up to a whole number of panels."""
    missing = -len(rows) % panel
    return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:])))) if missing else rows.contiguous()


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 rows and their scales, float32: the row's largest magnitude is 127."""
    weight = weight.float()
    scales = weight.abs().amax(1) / 127
    codes = (weight / torch.where(scales > 0, scales, 1.0)[:, None]).round_().to(torch.int8)
    return codes, scales


@dataclass(frozen=True, slots=True)
class Joined:
    """The rows of one after those of the other."""

    parts: Sequence[Weight]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]))

    def __getitem__(self, rows: slice) -> Part:
        found: list[Part] = []
        before = 0
        for part in self.parts:
            first, end = max(rows.start - before, 0), min(rows.stop - before, part.shape[0])
            if first < end:
                found.append(part[first:end])
            before += part.shape[0]
        return _combined(torch.cat, found)


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Rows of both by turns: gate and up meet in one register tile, where their product is taken. Slices have whole pairs."""

    first: Weight
    second: Weight

    @property
    def shape(self) -> torch.Size:
        return torch.Size((2 * self.first.shape[0], *self.first.shape[1:]))

    def __getitem__(self, rows: slice) -> Part:
        pairs = slice(rows.start // 2, rows.stop // 2)
        return _combined(lambda parts: torch.stack(parts, 1).flatten(0, 1), (self.first[pairs], self.second[pairs]))


def _combined(how: Callable[[list[torch.Tensor]], torch.Tensor], parts: Sequence[Part]) -> Part:
    """Beside codes, others become codes."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    return how(tensors) if len(tensors) == len(parts) else Int4Rows.combine(how, [_as_codes(part) for part in parts])


def _as_codes(part: Part) -> Int4Rows:
    return part if isinstance(part, Int4Rows) else quantize(part)


def _packed_shape(columns: int, depth: int, kind: str, panel: int) -> tuple[int, ...]:
    panels = -(-columns // panel)
    if kind == "int4":
        return (panels, depth // INT4_GROUP_SIZE, panel * (2 * 2 + INT4_GROUP_SIZE // 2))
    lane = _PER_LANE[kind]
    return (panels, depth // lane, panel, lane)


def _fill_panels(data: torch.Tensor, weight: torch.Tensor, panel: int) -> None:
    """Moves whole lanes of 32 bits, several times faster than their parts."""
    lanes = weight.to(data.dtype).contiguous().view(torch.int32)
    panels = data.view(torch.int32)[..., 0]
    columns, steps = lanes.shape
    whole = columns // panel
    split = whole * panel
    panels[:whole].copy_(lanes[:split].view(whole, panel, steps).transpose(1, 2))
    if split < columns:
        panels[whole, :, : columns - split].copy_(lanes[split:].T)


def _padded(row: torch.Tensor, panel: int) -> torch.Tensor:
    padded = torch.zeros(-(-len(row) // panel) * panel)
    padded[: len(row)] = row
    return padded
