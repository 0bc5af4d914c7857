"""Quantised K and V on the torch path: what formats lose, that attention loses no more, that tokens do not depend on plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill_executor.attention.backend import AttentionBackend, AttentionBatch, CacheShape
from tokenmill_executor.attention.quantization import FP8, INT4, INT8, KvFormat, dequantize, quantize
from tokenmill_executor.attention.reference import ReferenceAttention
from tokenmill_executor.attention.rotation import hadamard, rotated
from tokenmill_executor.engine import Engine
from tokenmill_executor.loading import Loader
from tokenmill_executor.model import load_runner
from tokenmill_executor.model.config import ModelError
from tokenmill_executor.prefix import PrefixHasher, hash_function
from tokenmill_executor.settings import parse_settings

from tests.fakes.batches import Blocks
from tests.unit.engine.plans import Driver, admission
from tests.unit.model.test_windows import Served, prompts, save

CPU = torch.device("cpu")
FORMATS = {"int8": INT8, "int4": INT4, "fp8": FP8}
NUMBER = st.floats(-1e4, 1e4, width=32)


def largest_error(heads: torch.Tensor, kind: KvFormat) -> torch.Tensor:
    """That rounding may make: of int4 a whole step at the end that has one code less."""
    extreme = heads.abs().amax(-1, keepdim=True)
    if kind is FP8:  # three bits behind the leading one, and no finer than 2^-9 of what becomes 448
        return torch.maximum(heads.abs() / 16, extreme / 448 / 1024)
    return extreme / 127 / 2 if kind is INT8 else torch.where(heads.abs() > extreme * 15 / 16, extreme / 8, extreme / 16)


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
@settings(deadline=None)
@given(rows=st.lists(st.lists(NUMBER, min_size=6, max_size=6), min_size=1, max_size=4))
def test_numbers_come_back_within_the_step_of_their_format(kind: KvFormat, rows: list[list[float]]) -> None:
    heads = torch.tensor(rows)
    codes, scales = quantize(heads, kind)
    assert codes.shape == (len(rows), 6 // kind.packed)
    error = (dequantize(codes, scales, kind, torch.float32) - heads).abs()
    assert bool((error <= 1.0001 * largest_error(heads, kind) + 1e-30).all())


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_what_is_no_number_shows_and_what_is_tiny_is_zero(kind: KvFormat) -> None:
    heads = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [-torch.inf, 2.0], [1e-38, -1e-38], [0.0, 0.0]])
    back = dequantize(*quantize(heads, kind), kind, torch.float32)
    assert back.isfinite().any(dim=1).tolist() == [False, False, False, True, True]
    assert not back[3:].any()


@pytest.mark.parametrize("size", [64, 80, 96, 6])
def test_a_rotation_is_its_own_inverse(size: int) -> None:
    turn = hadamard(size)
    torch.testing.assert_close(turn @ turn, torch.eye(size))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 80), (8, 1, 96)])
def test_attention_is_that_over_the_numbers_read_back(name: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """Nothing is lost but by rounding K and V: chunks, decodes, a window with sinks."""
    windows, kind = (None, 9), FORMATS[name]
    shape = CacheShape(2, heads, kv_heads, head_dim, windows, torch.float32, CPU, sinks=3, kv_cache_dtype=name)
    plain = CacheShape(2, heads, kv_heads, head_dim, windows, torch.float32, CPU, sinks=3)
    found, expected = rotated(ReferenceAttention(shape), shape), ReferenceAttention(plain)
    turn = hadamard(head_dim) if name == "int4" else torch.eye(head_dim)

    def read_back(numbers: torch.Tensor) -> torch.Tensor:
        return dequantize(*quantize(numbers @ turn, kind), kind, torch.float32) @ turn

    _compare(found, expected, read_back, shape)


def _compare(
    found: AttentionBackend, expected: AttentionBackend, read_back: Callable[[torch.Tensor], torch.Tensor], shape: CacheShape
) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = Blocks(32, 4, groups=len(shape.layout.groups))
    for backend in (found, expected):
        backend.allocate(32, 4)
    long, short = blocks.track([1] * 40), blocks.track([1] * 7)
    for counts in ({0: 30, 1: 5}, {0: 9, 1: 1}, {0: 1, 1: 1}):
        batch = AttentionBatch.of(blocks.batch([((long, short)[index], count) for index, count in counts.items()]), CPU)
        tokens = int(batch.query_starts[-1])
        query = torch.randn(tokens, shape.num_heads, shape.head_dim, generator=generator)
        key, value = torch.randn(2, tokens, shape.num_kv_heads, shape.head_dim, generator=generator)
        found.prepare(batch)
        expected.prepare(batch)
        for layer in range(shape.num_layers):
            found.write_kv(layer, key, value)
            expected.write_kv(layer, read_back(key), read_back(value))
            torch.testing.assert_close(found.attend(layer, query), expected.attend(layer, query), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_take_the_bytes_that_are_counted(dtype: torch.dtype) -> None:
    sizes = {}
    for name in ("auto", "bfloat16", *FORMATS):
        shape = CacheShape(3, 6, 2, 64, (None,) * 3, dtype, CPU, kv_cache_dtype=name)
        backend = ReferenceAttention(shape)
        backend.allocate(10, 16)
        assert all(len(tensor) == 10 and tensor.is_contiguous() for tensor in backend.storage())
        sizes[name] = sum(tensor.nbytes for tensor in backend.storage()) // 10
        assert sizes[name] == shape.block_bytes(16)
    # A scale of four bytes beside 64 numbers.
    assert sizes["bfloat16"] / sizes["int8"] == sizes["bfloat16"] / sizes["fp8"] == 128 / 68
    assert sizes["bfloat16"] / sizes["int4"] == 128 / 36


@pytest.mark.parametrize("name", FORMATS)
def test_preemptions_and_chunks_do_not_change_the_tokens(tmp_path: Path, name: str) -> None:
    """What a token's K and V become depends on nothing but the tokens before it."""
    save(tmp_path, "llama", {})
    given = prompts((23, 9, 17))
    undisturbed = Served(tmp_path, 60, seed=4, kv_cache_dtype=name).generate(given, 8, preempt=0.0)
    assert Served(tmp_path, 60, seed=5, kv_cache_dtype=name).generate(given, 8, preempt=0.2) == undisturbed


@pytest.mark.parametrize("name", FORMATS)
def test_a_cached_prefix_gives_the_tokens_of_a_cold_one(tmp_path: Path, name: str) -> None:
    save(tmp_path, "llama", {})
    runner = load_runner(tmp_path, dtype="float32", device="cpu", threads=1, block_size=4, kv_cache_dtype=name)
    driver = Driver(Engine(runner, 60, 4, 8, hasher=PrefixHasher(hash_function("sha256"), name, 4)))
    (prompt,) = prompts((21,))
    outputs = []
    for sequence_id in (1, 2):
        result = driver.plan({sequence_id: 21}, [admission(sequence_id, prompt, [], 6, temperature=0.0, ignore_eos=True)])
        outputs.append(list(result.token_ids))
        cached = sum(result.num_cached)
        while not result.finishes[0]:
            result = driver.plan({sequence_id: 1})
            outputs[-1] += result.token_ids
    assert cached == 20
    assert outputs[0] == outputs[1]


def test_describe_tells_the_cache_type_and_the_blocks_it_makes_room_for(tmp_path: Path) -> None:
    save(tmp_path, "llama", {"head_dim": 32})
    flags = ["--model", str(tmp_path), "--dtype", "float32", "--block-size", "4", "--kv-cache-memory-bytes", "256KiB"]
    told = {}
    for name in ("auto", *FORMATS):
        loader = Loader(parse_settings([*flags, "--kv-cache-dtype", name], {}))
        loader.load()
        description = loader.offer("one").description
        assert (f"kv_cache_dtype={name}" in description.features) == (name != "auto")
        told[name] = description.num_blocks, description.cache_version
    blocks = {name: count for name, (count, _) in told.items()}
    assert blocks["int8"] == blocks["fp8"]
    assert blocks["int8"] // blocks["auto"] == 3  # 4 * 32 bytes against 32 + 4
    assert blocks["int4"] // blocks["auto"] == 6  # 16 + 4
    assert len({version for _, version in told.values()}) == 4  # no prefix is found across types


@pytest.mark.parametrize("name", ["auto", *FORMATS])
def test_the_memory_of_each_cache_type_can_be_populated(tmp_path: Path, name: str) -> None:
    save(tmp_path, "llama", {"head_dim": 32})
    runner = load_runner(tmp_path, device="cpu", kv_cache_dtype=name)
    runner.allocate(8, 16)
    pieces = 0
    while runner.populate_some():
        pieces += 1
    assert pieces >= 2  # K and V at least


def test_an_unknown_cache_type_is_refused_in_a_sentence(tmp_path: Path) -> None:
    save(tmp_path, "llama", {})
    with pytest.raises(ModelError, match="KV cache type 'int2' is not supported; choose one of auto"):
        load_runner(tmp_path, device="cpu", kv_cache_dtype="int2")
