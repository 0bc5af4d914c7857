"""Each matrix kernel by itself against float32, on shapes that fill its tiles and shapes that do not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tokenmill_executor.cpu import library, packing
from tokenmill_executor.cpu.memory import HugeArena
from tokenmill_executor.cpu.packing import Interleaved, Joined, PackedMatrix, Weight, pack, packed_bytes, quantize_rows
from tokenmill_executor.model.int4 import Int4Rows, quantize

from tests.unit.cpu.small_models import needs_kernels, runnable_sets

pytestmark = needs_kernels

ROWS = (1, 2, 5, 8, 13, 64, 131)
SHAPES = ((48, 64), (1, 64), (47, 128), (50, 192), (96, 64), (310, 320))
# Of the size that products of such random numbers have.
TOLERANCE = {"bfloat16": 1e-5, "int8": 0.02, "int4": 0.02}
KINDS = list(TOLERANCE)
ROUNDING = 4e-3  # of a result in bfloat16


def _packed(weight: Weight, bias: torch.Tensor | None, kind: str, instruction_set: str) -> PackedMatrix:
    panel = library.load(instruction_set).tm_panel_columns()
    return pack(weight, bias, kind, panel, HugeArena(packed_bytes(weight.shape[0], weight.shape[1], kind, panel)))


def _representable(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What 4 bits make of a weight is no fault of the kernels."""
    return quantize(weight).dequantize() if kind == "int4" else weight


def _multiply(
    packed: PackedMatrix, rows: torch.Tensor, store: int, into: torch.Tensor, instruction_set: str, threads: int = 2
) -> None:
    workspace = torch.empty(16 * rows.numel() + 1024, dtype=torch.uint8)
    out = into.data_ptr()
    multiply = library.load(instruction_set).tm_gemm
    multiply(packed.record, rows.contiguous().data_ptr(), len(rows), store, out, out, threads, workspace.data_ptr())


def _error(found: torch.Tensor, expected: torch.Tensor, size: float) -> float:
    return float((found - expected).square().mean().sqrt()) / size


@pytest.mark.parametrize("instruction_set", runnable_sets)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_product_with_bias_is_near_float32(instruction_set: str, kind: str, columns: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(columns * depth)
    weight = _representable(torch.randn((columns, depth), generator=generator).bfloat16().float(), kind)
    bias = torch.randn(columns, generator=generator)
    packed = _packed(weight, bias, kind, instruction_set)
    for count in ROWS:
        rows = torch.randn((count, depth), generator=generator).bfloat16()
        found = torch.full((count, columns), torch.nan)
        _multiply(packed, rows, library.STORE_FLOATS, found, instruction_set)
        assert _error(found, rows.float() @ weight.T + bias, depth**0.5) < TOLERANCE[kind], count


@pytest.mark.parametrize("instruction_set", runnable_sets)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_product_is_added_to_the_residual(instruction_set: str, kind: str, columns: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(columns + depth)
    weight = _representable(torch.randn((columns, depth), generator=generator).bfloat16().float(), kind)
    packed = _packed(weight, None, kind, instruction_set)
    for count in ROWS:
        rows, residual = (
            torch.randn((count, depth), generator=generator).bfloat16(),
            torch.randn((count, columns), generator=generator),
        )
        found = residual.clone()
        _multiply(packed, rows, library.STORE_ADD, found, instruction_set)
        assert _error(found, rows.float() @ weight.T + residual, depth**0.5) < TOLERANCE[kind], count


@pytest.mark.parametrize("instruction_set", runnable_sets)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [1, 23, 24, 25, 72, 155])
def test_silu_of_gate_times_up(instruction_set: str, kind: str, inner: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    depth = 128
    gate, up = (_representable(one.bfloat16().float() / 8, kind) for one in torch.randn((2, inner, depth), generator=generator))
    packed = _packed(Interleaved(gate, up), None, kind, instruction_set)
    for count in ROWS:
        rows = torch.randn((count, depth), generator=generator).bfloat16()
        # One more element than the result: it must stay as it is.
        found = torch.full((count * inner + 1,), 7.0, dtype=torch.bfloat16)
        _multiply(packed, rows, library.STORE_SILU_MUL, found, instruction_set)
        expected = torch.nn.functional.silu(rows.float() @ gate.T) * (rows.float() @ up.T)
        assert _error(found[:-1].float().view(count, inner), expected, 1.0) < 2 * TOLERANCE[kind] + ROUNDING, count
        assert found[-1] == 7.0


@pytest.mark.parametrize("instruction_set", runnable_sets)
def test_int8_product_is_exact_on_what_int8_can_say(instruction_set: str) -> None:
    """Whole numbers up to 127 in each row and group: nothing is rounded, so no tolerance hides a wrong sign, offset or order."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-127, 128, (70, 192), generator=generator).float()
    rows = torch.randint(-127, 128, (9, 192), generator=generator).float()
    weight[:, 0] = 127
    rows[:, ::64] = -127
    found = torch.empty((9, 70))
    _multiply(_packed(weight, None, "int8", instruction_set), rows.bfloat16(), library.STORE_FLOATS, found, instruction_set)
    assert torch.equal(found, rows @ weight.T)


@pytest.mark.parametrize("instruction_set", runnable_sets)
def test_int4_product_is_exact_on_what_int4_can_say(instruction_set: str) -> None:
    """Whole numbers, all sixteen codes in every group, and minima and scales that differ between groups and columns."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.stack([torch.randperm(32, generator=generator) % 16 for _ in range(70 * 6)]).to(torch.uint8).view(70, 192)
    scales, minima = torch.randint(1, 5, (70, 6), generator=generator), torch.randint(-9, 10, (70, 6), generator=generator)
    weight = Int4Rows(codes, scales.half(), minima.half())
    rows = torch.randint(-127, 128, (9, 192), generator=generator).float()
    rows[:, ::64] = -127
    found = torch.empty((9, 70))
    packed = _packed(weight, None, "int4", instruction_set)
    _multiply(packed, rows.bfloat16(), library.STORE_FLOATS, found, instruction_set)
    assert torch.equal(found, rows @ weight.dequantize().T)


@pytest.mark.parametrize("instruction_set", runnable_sets)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_that_is_not_a_number_gives_none_and_harms_no_other(instruction_set: str, kind: str, poison: float) -> None:
    weight, rows = torch.ones((60, 64)), torch.ones((10, 64), dtype=torch.bfloat16)
    rows[4, 17] = poison
    found = torch.zeros((10, 60))
    _multiply(_packed(weight, None, kind, instruction_set), rows, library.STORE_FLOATS, found, instruction_set)
    assert not torch.isfinite(found[4]).any()
    assert torch.isfinite(found[torch.arange(10) != 4]).all()


@pytest.mark.parametrize("instruction_set", runnable_sets)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_packed_panel_by_panel_are_those_packed_at_once(
    instruction_set: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices that begin and end within the parts of a matrix, codes beside numbers among them."""
    first, second, third = torch.randn((3, 70, 128), generator=torch.Generator().manual_seed(5))
    beside = quantize(second) if kind == "int4" else second
    for weight in (Joined((first, beside, third)), Interleaved(first, beside)):
        whole = _packed(weight, None, kind, instruction_set)
        with monkeypatch.context() as patch:
            patch.setattr(packing, "_SLICE_BYTES", 1)
            sliced = _packed(weight, None, kind, instruction_set)
        assert len(list(packing.slices(weight.shape[0], weight.shape[1], panel=16))) == 1
        for one, other in zip(whole.kept, sliced.kept, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_rows_of_zeros_quantize_to_zeros() -> None:
    codes, scales = quantize_rows(torch.zeros((2, 64)))
    assert not codes.any()
    assert not scales.any()


def test_a_depth_that_groups_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="depth 96"):
        pack(torch.ones((48, 96)), None, "int8", 16, HugeArena(1 << 20))


@pytest.mark.parametrize("instruction_set", runnable_sets)
def test_calls_from_several_threads_with_teams_of_any_size_share_one_pool(instruction_set: str) -> None:
    generator = torch.Generator().manual_seed(5)
    packed = _packed(torch.randn((310, 128), generator=generator), None, "bfloat16", instruction_set)
    batches = [torch.randn((count, 128), generator=generator).bfloat16() for count in ROWS]

    def products(threads: int) -> list[torch.Tensor]:
        found = [torch.empty((len(rows), 310)) for rows in batches * 4]
        for rows, into in zip(batches * 4, found, strict=True):
            _multiply(packed, rows, library.STORE_FLOATS, into, instruction_set, threads)
        return found

    alone = products(1)
    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(products, [1, 2, 5, 3, 1, 4, 2, 6]):
            assert all(map(torch.equal, found, alone))
