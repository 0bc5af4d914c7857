"""Weights in the order that the kernels read them, panels of 48 columns (see csrc/kernels.h), packed once when a model is loaded.

Must not know: layers' names, files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tokenmill_executor.cpu.library import GROUP_SIZE, INT4_GROUP_SIZE, MATRIX_KINDS, PANEL_COLUMNS, Matrix
from tokenmill_executor.cpu.memory import HugeArena, padded_bytes
from tokenmill_executor.model.int4 import Int4Rows

_DATA_TYPES = {"bfloat16": torch.bfloat16, "int8": torch.uint8, "int4": torch.uint8}
_PER_LANE = {"bfloat16": 2, "int8": 4}
# Whole panels: what is made on the way of a large matrix takes little beside it.
_ROWS_AT_ONCE = 64 * PANEL_COLUMNS


Weight = torch.Tensor | Int4Rows


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The record that kernels take, and what keeps its memory alive."""

    record: Matrix
    kept: tuple[torch.Tensor, ...]


def packed_bytes(columns: int, depth: int, kind: str) -> int:
    """What one weight takes of the arena, its scales and bias apart."""
    return padded_bytes(_packed_shape(columns, depth, kind), _DATA_TYPES[kind])


def pack(weight: Weight, bias: torch.Tensor | None, kind: str, arena: HugeArena) -> PackedMatrix:
    """A weight of [columns, depth] and a bias of [columns], as `kind`: "bfloat16" or "int8"; 4-bit codes as they are."""
    if isinstance(weight, Int4Rows):
        return _pack_int4(weight, bias, arena)
    columns, depth = weight.shape
    if depth % (GROUP_SIZE if kind == "int8" else 2):
        raise ValueError(f"{kind} weights of depth {depth} cannot be packed")
    data = arena.take(_packed_shape(columns, depth, kind), _DATA_TYPES[kind])
    # Those beyond the last column stay 0, and so do their scales.
    scales = _padded(torch.zeros(columns)) if kind == "int8" else None
    for start in range(0, columns, _ROWS_AT_ONCE):
        rows = weight[start : start + _ROWS_AT_ONCE]
        if scales is not None:
            codes, scales[start : start + len(rows)] = quantize_rows(rows)
            # Plus 128 as unsigned bytes.
            rows = codes.view(torch.uint8) ^ 0x80
        _fill_panels(data[start // PANEL_COLUMNS :], rows)
    padded_bias = None if bias is None else _padded(bias)
    record = Matrix(
        data.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        0 if padded_bias is None else padded_bias.data_ptr(),
        columns,
        depth,
        MATRIX_KINDS[kind],
    )
    return PackedMatrix(record, tuple(x for x in (data, scales, padded_bias) if x is not None))


def _pack_int4(rows: Int4Rows, bias: torch.Tensor | None, arena: HugeArena) -> PackedMatrix:
    columns, depth = rows.shape
    if depth % GROUP_SIZE:
        raise ValueError(f"int4 weights of depth {depth} cannot be packed")
    data = arena.take(_packed_shape(columns, depth, "int4"), torch.uint8)
    panels, groups, _ = data.shape
    halves = 2 * PANEL_COLUMNS
    for start, part in ((0, rows.scales), (halves, rows.minima)):
        by_panel = _whole_panels(part).view(panels, PANEL_COLUMNS, groups).transpose(1, 2).contiguous()
        data[..., start : start + halves] = by_panel.view(torch.uint8)
    # Sixteen depths in the low halves of bytes, the next sixteen in the high ones.
    codes = _whole_panels(rows.codes).view(panels, PANEL_COLUMNS, groups, 2, INT4_GROUP_SIZE // 8, 4)
    packed = codes[:, :, :, 0] | codes[:, :, :, 1] << 4
    data[..., 2 * halves :] = packed.permute(0, 2, 3, 1, 4).reshape(panels, groups, -1)
    padded_bias = None if bias is None else _padded(bias)
    bias_address = 0 if padded_bias is None else padded_bias.data_ptr()
    record = Matrix(data.data_ptr(), 0, bias_address, columns, depth, MATRIX_KINDS["int4"])
    return PackedMatrix(record, (data,) if padded_bias is None else (data, padded_bias))


def _whole_panels(rows: torch.Tensor) -> torch.Tensor:
    """With rows of zeros up to a whole number of panels."""
    missing = -len(rows) % PANEL_COLUMNS
    return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:])))) if missing else rows.contiguous()


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 rows and their scales, float32: the row's largest magnitude is 127."""
    weight = weight.float()
    scales = weight.abs().amax(1) / 127
    codes = (weight / torch.where(scales > 0, scales, 1.0)[:, None]).round_().to(torch.int8)
    return codes, scales


def joined(weights: Sequence[Weight]) -> Weight:
    """The rows of one after those of the other."""
    return _combined(torch.cat, weights)


def interleaved(first: Weight, second: Weight) -> Weight:
    """Rows of both by turns: gate and up meet in one register tile, where their product is taken."""
    return _combined(lambda parts: torch.stack(parts, 1).flatten(0, 1), (first, second))


def _combined(how: Callable[[list[torch.Tensor]], torch.Tensor], weights: Sequence[Weight]) -> Weight:
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    codes = [weight for weight in weights if isinstance(weight, Int4Rows)]
    assert not tensors or not codes, "one matrix is of one kind"
    return how(tensors) if tensors else Int4Rows.combine(how, codes)


def _packed_shape(columns: int, depth: int, kind: str) -> tuple[int, ...]:
    panels = -(-columns // PANEL_COLUMNS)
    if kind == "int4":
        return (panels, depth // INT4_GROUP_SIZE, PANEL_COLUMNS * (2 * 2 + INT4_GROUP_SIZE // 2))
    lane = _PER_LANE[kind]
    return (panels, depth // lane, PANEL_COLUMNS, lane)


def _fill_panels(data: torch.Tensor, weight: torch.Tensor) -> None:
    """Moves whole lanes of 32 bits, several times faster than their parts."""
    lanes = weight.to(data.dtype).contiguous().view(torch.int32)
    panels = data.view(torch.int32)[..., 0]
    columns, steps = lanes.shape
    whole = columns // PANEL_COLUMNS
    split = whole * PANEL_COLUMNS
    panels[:whole].copy_(lanes[:split].view(whole, PANEL_COLUMNS, steps).transpose(1, 2))
    if split < columns:
        panels[whole, :, : columns - split].copy_(lanes[split:].T)


def _padded(row: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(-(-len(row) // PANEL_COLUMNS) * PANEL_COLUMNS)
    padded[: len(row)] = row
    return padded
