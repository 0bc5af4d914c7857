"""The whole step against the float32 decoder, on random shapes and mixes of prefill, chunks and decodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenmill_executor.attention.layout import cache_layout
from tokenmill_executor.cpu.model import CpuModel
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.model.int4 import quantize
from tokenmill_executor.model.tensors import LazyTensors
from tokenmill_executor.runner import Batch

from tests.unit.cpu.small_models import (
    NUM_BLOCKS,
    TOLERANCE,
    assert_near_oracle,
    cpu_model,
    make_batch,
    needs_kernels,
    random_tensors,
    random_tokens,
    relative_error,
    representable,
    runnable_sets,
    scattered_tables,
    small_config,
)

pytestmark = needs_kernels

# (context after the step, new tokens) of each of four sequences, step by step: lone tokens, blocks exactly full and one over,
# chunks after context, decodes beside chunks, contexts long enough to be split.
STEPS = (
    ((1, 1), (15, 15), (17, 17), (500, 500)),
    ((2, 1), (16, 1), (31, 14), (511, 11)),
    ((3, 1), (17, 1), (32, 1), (512, 1)),
    ((35, 32), (113, 96), (33, 1), (513, 1)),
    ((36, 1), (114, 1), (97, 64), (514, 1)),
)


def _steps(config: ModelConfig, seed: int) -> list[Batch]:
    tables = scattered_tables(4, 514, seed)
    tokens = [random_tokens(config, 514, seed + row) for row in range(4)]
    groups = len(cache_layout(config.windows).groups)
    return [
        make_batch([(tokens[row][:context], new, tables[row]) for row, (context, new) in enumerate(step)], groups) for step in STEPS
    ]


@pytest.mark.parametrize("instruction_set", runnable_sets)
@pytest.mark.parametrize(("quantization", "kv_cache_dtype"), TOLERANCE)
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group"),
    [(64, 3, 1), (80, 2, 2), (64, 1, 3), (96, 1, 4), (64, 2, 5), (96, 1, 6), (64, 1, 7), (128, 1, 8), (64, 1, 20)],
)
def test_step_is_near_float32(
    instruction_set: str, quantization: str | None, kv_cache_dtype: str, head_dim: int, num_kv_heads: int, group: int
) -> None:
    config = small_config(head_dim=head_dim, num_kv_heads=num_kv_heads, num_heads=num_kv_heads * group, intermediate_size=320)
    tensors = representable(random_tensors(config), quantization)
    model = cpu_model(config, tensors, quantization=quantization, kv_cache_dtype=kv_cache_dtype, instruction_set=instruction_set)
    assert_near_oracle(model, tensors, _steps(config, head_dim), TOLERANCE[quantization, kv_cache_dtype])


def test_an_int8_cache_holds_what_the_torch_paths_does() -> None:
    """The same rounding: beside torch's int8 cache the kernels are as near as beside its float one without."""
    config = small_config()
    tensors = random_tensors(config)
    model = cpu_model(config, tensors, kv_cache_dtype="int8")
    reference = Decoder(config, tensors, torch.float32, torch.device("cpu"), 1024, kv_cache_dtype="int8")
    reference.allocate(NUM_BLOCKS, 16)
    for batch in _steps(config, seed=4):
        found, expected = model.forward(batch), reference.forward(batch)
        assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 0.008
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"qk_norm": True},
        {"tie_word_embeddings": True},
        {"windows": (None, 20)},
        {"windows": (1, 100)},
        {"windows": (8, 30), "sinks": 20},  # more sinks than the window is wide: of later ones a query sees nothing
        {"hidden_size": 82, "intermediate_size": 50, "vocab_size": 97, "head_dim": 16, "num_heads": 5, "num_kv_heads": 1},
        {"head_dim": 256, "num_heads": 20, "num_kv_heads": 1, "num_layers": 1},
    ],
    ids=str,
)
def test_variants_of_the_family(changes: dict[str, object]) -> None:
    config = small_config(**changes)
    tensors = random_tensors(config)
    assert_near_oracle(cpu_model(config, tensors), tensors, _steps(config, config.head_dim), TOLERANCE[None, "auto"])


@pytest.mark.parametrize("instruction_set", runnable_sets)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_embeddings_come_out_of_the_head_that_shares_them(instruction_set: str, quantization: str | None) -> None:
    """To the bit, of numbers that bfloat16 and int8 can say; the vocabulary fills its last panel only in part."""
    config = small_config(tie_word_embeddings=True, vocab_size=97)
    tensors = random_tensors(config)
    name = "model.embed_tokens.weight"
    tensors[name] = torch.randint(-127, 128, (97, config.hidden_size), generator=torch.Generator().manual_seed(6)) / 64
    tensors[name][:, 5] = 127 / 64
    tied = cpu_model(config, tensors, quantization=quantization, instruction_set=instruction_set)
    untied = cpu_model(
        replace(config, tie_word_embeddings=False),
        {**tensors, "lm_head.weight": tensors[name]},
        quantization=quantization,
        instruction_set=instruction_set,
    )
    for batch in _steps(config, seed=2):
        assert torch.equal(tied.forward(batch), untied.forward(batch))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_do_not_change_a_bit(num_threads: int) -> None:
    config = small_config()
    tensors = random_tensors(config)
    two, other = cpu_model(config, tensors), CpuModel(config, tensors, max_model_len=1024, threads=num_threads)
    other.allocate(NUM_BLOCKS, 16)
    for batch in _steps(config, seed=1):
        assert torch.equal(two.forward(batch), other.forward(batch))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_sequence_is_the_same_to_the_bit_alone_and_in_a_batch(quantization: str | None) -> None:
    config = small_config()
    tensors = random_tensors(config)
    together, alone = cpu_model(config, tensors, quantization=quantization), cpu_model(config, tensors, quantization=quantization)
    tables = scattered_tables(4, 514)
    tokens = [random_tokens(config, 514, row) for row in range(4)]
    for step in STEPS:
        rows = [(tokens[row][:context], new, tables[row]) for row, (context, new) in enumerate(step)]
        whole = together.forward(make_batch(rows))
        for row, sequence in enumerate(rows):
            assert torch.equal(alone.forward(make_batch([sequence]))[0], whole[row])


def test_a_prompt_is_the_same_to_the_bit_in_chunks_and_whole() -> None:
    config = small_config()
    tensors = random_tensors(config)
    tokens, tables = random_tokens(config, 300, 1), scattered_tables(2, 300)
    model = cpu_model(config, tensors)
    whole = model.forward(make_batch([(tokens, 300, tables[0])])).clone()
    for end, new in ((1, 1), (16, 15), (17, 1), (150, 133), (300, 150)):
        chunked = model.forward(make_batch([(tokens[:end], new, tables[1])]))
    assert torch.equal(chunked, whole)


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_what_a_freed_block_holds_does_not_matter(kv_cache_dtype: str) -> None:
    """Blocks come back full of another sequence's values, here not a number in every place."""
    config = small_config()
    tensors = random_tensors(config)
    clean, dirty = (cpu_model(config, tensors, kv_cache_dtype=kv_cache_dtype) for _ in range(2))
    assert dirty._cache is not None
    dirty._cache._bytes.fill_(0xFF)
    for batch in _steps(config, seed=2):
        assert torch.equal(clean.forward(batch), dirty.forward(batch))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_a_poisoned_sequence_shows_and_harms_no_other(quantization: str | None, kv_cache_dtype: str) -> None:
    config = small_config()
    tensors = random_tensors(config)
    clean = cpu_model(config, tensors, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    poisoned_token = 300
    tensors["model.embed_tokens.weight"][poisoned_token, 3] = torch.nan
    model = cpu_model(config, tensors, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    tables = scattered_tables(2, 40)
    well, ill = [5, 6, 7], [8, poisoned_token, poisoned_token]
    found = model.forward(make_batch([(well, 3, tables[0]), (ill, 3, tables[1])]))
    assert torch.equal(found[0], clean.forward(make_batch([(well, 3, tables[0])]))[0])
    assert torch.isnan(found[1]).any()


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_a_value_that_is_not_a_number_shows(kv_cache_dtype: str) -> None:
    config = small_config(qkv_bias=True, num_layers=1)
    tensors = random_tensors(config)
    tensors["model.layers.0.self_attn.v_proj.bias"][:] = torch.nan
    model = cpu_model(config, tensors, kv_cache_dtype=kv_cache_dtype)
    batch = make_batch([(random_tokens(config, 20, 1), 20, scattered_tables(1, 64)[0])])
    assert torch.isnan(model.forward(batch)).all()


def test_sinks_stay_visible_past_a_window() -> None:
    """Equal to full attention where sinks and window together cover the context, else not."""
    config = small_config(windows=(24, 24), sinks=20)
    tensors = random_tensors(config)
    full = cpu_model(small_config(), tensors)
    sinks = cpu_model(config, tensors)
    tokens, table = random_tokens(config, 80, 4), scattered_tables(1, 80)[0]
    for end, new, same in ((40, 40, True), (44, 4, True), (80, 36, False)):
        batch = make_batch([(tokens[:end], new, table)])
        error = relative_error(sinks.forward(batch), full.forward(batch))
        assert error < 5e-3 if same else error > 5e-2, (end, error)


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_what_a_window_has_left_behind_is_never_read(kv_cache_dtype: str) -> None:
    """To the bit as with all blocks there, though block 0, which then stands in their places, holds no number."""
    config = small_config(windows=(None, 20), sinks=5)
    tensors = random_tensors(config)
    whole, slid = (cpu_model(config, tensors, kv_cache_dtype=kv_cache_dtype) for _ in range(2))
    tokens = random_tokens(config, 300, 7)
    table = [block for block in scattered_tables(1, 2500)[0] if block][:19]
    window = slid.block_groups[1]
    assert slid._cache is not None
    slid._cache._bytes.view(-1, slid._layer_block_bytes())[::NUM_BLOCKS] = 0xFF
    computed = 0
    for end in (1, 30, 47, 48, 49, 150, 151, 299, 300):
        batches = [make_batch([(tokens[:end], end - computed, table)], 2) for _ in range(2)]
        first = window.first_needed(computed, 16)
        batches[1].block_tables[1, 0, window.sink_blocks(16) : max(first, window.sink_blocks(16))] = 0
        assert torch.equal(slid.forward(batches[1]), whole.forward(batches[0])), end
        computed = end


def test_only_rows_that_sample_have_logits() -> None:
    config = small_config()
    model = cpu_model(config, random_tensors(config))
    tables = scattered_tables(3, 40)
    rows = [(random_tokens(config, 5 + row, row), 5 + row, tables[row]) for row in range(3)]
    every = model.forward(make_batch(rows)).clone()
    batch = make_batch(rows)
    batch.sample_rows = np.array([0, 2], np.int32)
    assert torch.equal(model.forward(batch), every[[0, 2]])
    batch.sample_rows = np.array([], np.int32)
    assert model.forward(batch).shape == (0, config.vocab_size)
    batch.sample_rows = np.array([2, 0], np.int32)
    with pytest.raises(ValueError, match="ascend"):
        model.forward(batch)


def test_block_bytes_are_what_allocate_takes() -> None:
    config = small_config()
    tensors = random_tensors(config)
    assert cpu_model(config, tensors).block_bytes(16) == 2 * 2 * 2 * 64 * 16 * 2
    assert cpu_model(config, tensors, kv_cache_dtype="int8").block_bytes(16) == 2 * 2 * 2 * (64 + 4) * 16


def test_int4_weights_are_the_codes_of_the_file() -> None:
    """And not those that its numbers would give: here they are all 0."""
    config = small_config()
    tensors = random_tensors(config)
    codes = {name: quantize(tensor) for name, tensor in tensors.items() if "_proj.weight" in name}
    stored = LazyTensors({name: torch.zeros_like(one) if name in codes else one for name, one in tensors.items()}, codes)
    model = cpu_model(config, stored, quantization="int4")
    assert_near_oracle(model, representable(tensors, "int4"), _steps(config, seed=3), TOLERANCE["int4", "auto"])
