"""A quantised cache in Triton against the reference: the same codes, and from them the same outputs.

Both round alike but for the last bit of a product, so a number in a few thousands may get the neighbouring code; what that can do
to an output is part of the tolerance.
"""

from __future__ import annotations

import pytest
import torch
from tokenmill_executor.attention.backend import CacheShape
from tokenmill_executor.attention.triton_backend import Tiling, TritonAttention

from tests.unit.cuda.test_triton_attention import CPU, SHAPES, Pair

# Of outputs of size one: a step of a key moves a weight, one of a value the output, by about a step over the positions seen.
TOLERANCES = {"int8": 2e-3, "int4": 3e-2, "fp8": 1e-2, "bfloat16": 1e-5}
QUANTIZED = ("int8", "int4", "fp8")


def cache_shape(
    heads: int, kv_heads: int, head_dim: int, windows: tuple[int | None, ...], kv_cache_dtype: str, sinks: int = 0
) -> CacheShape:
    return CacheShape(
        len(windows), heads, kv_heads, head_dim, windows, torch.float32, CPU, sinks=sinks, kv_cache_dtype=kv_cache_dtype
    )


def check_codes(pair: Pair) -> None:
    """Equal but for neighbours, and those are few."""
    for mine, theirs in zip(
        (*pair.triton._keys, *pair.triton._values), (*pair.reference._keys, *pair.reference._values), strict=True
    ):
        assert mine.scales is not None
        assert theirs.scales is not None
        torch.testing.assert_close(mine.scales, theirs.scales, rtol=1e-6, atol=0)
        blocks = torch.arange(len(mine.codes))
        found, expected = mine.gather(blocks, torch.float32), theirs.gather(blocks, torch.float32)
        apart = (found - expected).abs()
        # fp8's largest steps are 32 of 448; whole numbers' are 1.
        step = theirs.scales.abs()[..., None] * (32 if mine.codes.dtype == torch.float8_e4m3fn else 1)
        assert bool((apart <= 1.001 * step).all())
        assert float((apart > 1e-6).float().mean()) < 1e-3


@pytest.mark.parametrize("kv_cache_dtype", TOLERANCES)
@pytest.mark.parametrize("sizes", SHAPES, ids=lambda sizes: f"{sizes[0]}x{sizes[1]}x{sizes[2]}")
def test_chunks_decodes_and_their_mixtures_equal_the_reference(
    sizes: tuple[int, int, int, tuple[int | None, ...]], kv_cache_dtype: str
) -> None:
    pair = Pair(cache_shape(*sizes, kv_cache_dtype), tolerance=TOLERANCES[kv_cache_dtype])
    long, short, single = pair.tracks(24, 5, 1)
    pair.step((long, 17), (short, 5))
    pair.step((long, 6), (single, 1))
    pair.step((long, 1))
    if kv_cache_dtype in QUANTIZED:
        check_codes(pair)


@pytest.mark.parametrize("kv_cache_dtype", QUANTIZED)
def test_sinks_windows_and_splits(kv_cache_dtype: str) -> None:
    shape = cache_shape(6, 2, 64, (20, None), kv_cache_dtype, sinks=18)
    tilings = {"decode": Tiling(16, 16, 4, 3), "chunk": Tiling(64, 16, 4, 2)}
    pair = Pair(shape, 16, tolerance=TOLERANCES[kv_cache_dtype], **tilings)
    long, short = pair.tracks(52, 8)
    pair.step((long, 50), (short, 7))
    assert pair.triton.decode_splits(2, 52) > 1
    pair.step((long, 2), (short, 1))


@pytest.mark.parametrize("kv_cache_dtype", QUANTIZED)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
def test_what_is_no_number_shows_in_its_own_sequence_alone(kv_cache_dtype: str) -> None:
    pair = Pair(cache_shape(2, 1, 64, (None,), kv_cache_dtype), tolerance=TOLERANCES[kv_cache_dtype])
    pair.poison = {3: torch.nan, 4: torch.inf}
    well, ill = pair.tracks(3, 4)
    pair.step((well, 3), (ill, 4))
    assert pair.last.isfinite().all(dim=(1, 2)).tolist() == [True, True, True, False, False, False, False]
    pair.poison = {}
    pair.triton.erase(pair.triton._ready().slots[:, 3:].flatten())
    assert all(bool(tensor.float().isfinite().all()) for tensor in pair.triton.storage())


@pytest.mark.parametrize("kv_cache_dtype", QUANTIZED)
def test_blocks_of_others_are_never_seen(kv_cache_dtype: str) -> None:
    pair = Pair(cache_shape(6, 2, 64, (None, 3), kv_cache_dtype), tolerance=TOLERANCES[kv_cache_dtype])
    for heads in (*pair.triton._keys, *pair.triton._values):
        assert heads.scales is not None
        heads.scales.fill_(torch.nan)
    long, short = pair.tracks(14, 6)
    pair.step((long, 13), (short, 5))
    pair.step((long, 1), (short, 1))


def test_a_cache_in_another_type_than_the_model_gives_outputs_in_the_models() -> None:
    backend = TritonAttention(cache_shape(2, 1, 64, (None,), "bfloat16"), num_processors=1)
    backend.allocate(4, 4)
    assert [tensor.dtype for tensor in backend.storage()] == [torch.bfloat16] * 2
