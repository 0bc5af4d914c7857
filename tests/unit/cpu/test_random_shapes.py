"""The whole step against the float32 decoder, on models and batches of which everything is drawn by chance."""

from __future__ import annotations

import random

import pytest
from tokenmill_executor.attention.layout import cache_layout
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.runner import Batch

from tests.unit.cpu.small_models import (
    TOLERANCE,
    assert_near_oracle,
    cpu_model,
    make_batch,
    needs_kernels,
    random_tensors,
    random_tokens,
    representable,
    runnable_sets,
    scattered_tables,
    small_config,
)

pytestmark = needs_kernels

LONGEST = 600
STEPS = 4


def _random_config(rng: random.Random, quantized: bool) -> ModelConfig:
    head_dim, group = rng.choice((16, 48, 64, 80, 96, 112, 128, 256)), rng.randint(1, 8)
    step = 64 if quantized else 2
    num_kv_heads = rng.choice([heads for heads in (1, 2, 3, 4) if heads * group * head_dim % step == 0] or [4])
    windows = tuple(rng.choice((None, rng.randint(1, 40), rng.randint(40, LONGEST))) for _ in range(2))
    return small_config(
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * group,
        hidden_size=step * rng.randint(1, 192 // step),
        intermediate_size=step * rng.randint(1, 320 // step),
        vocab_size=rng.randint(2, 400) if rng.random() < 0.3 else rng.randint(100, 400),
        tie_word_embeddings=rng.random() < 0.5,
        qkv_bias=rng.random() < 0.3,
        qk_norm=rng.random() < 0.3,
        windows=windows,
        sinks=rng.choice((0, 1, 5, 16, 33)) if any(windows) else 0,
    )


def _random_steps(rng: random.Random, config: ModelConfig) -> list[Batch]:
    """Sequences that come and go: each step takes some of them further, by a token or a chunk."""
    count = rng.randint(1, 4)
    tables = scattered_tables(count, LONGEST, rng.randrange(1000))
    tokens = [random_tokens(config, LONGEST, rng.randrange(1000)) for _ in range(count)]
    groups = len(cache_layout(config.windows, config.sinks).groups)
    known, batches = [0] * count, []
    for _ in range(STEPS):
        taking_part = rng.sample(range(count), rng.randint(1, count))
        new = {row: min(LONGEST - known[row], rng.choice((1, rng.randint(1, 40), rng.randint(1, 500)))) for row in taking_part}
        rows = []
        for row, taken in new.items():
            if taken:
                known[row] += taken
                rows.append((tokens[row][: known[row]], taken, tables[row]))
        if rows:
            batches.append(make_batch(rows, groups))
    return batches


@pytest.mark.parametrize("instruction_set", runnable_sets)
@pytest.mark.parametrize("seed", range(15))
def test_a_random_model_is_near_float32(seed: int, instruction_set: str) -> None:
    rng = random.Random(seed)
    quantization, kv_cache_dtype = list(TOLERANCE)[seed % len(TOLERANCE)]
    config = _random_config(rng, quantization is not None)
    tensors = representable(random_tensors(config, seed), quantization)
    model = cpu_model(config, tensors, quantization=quantization, kv_cache_dtype=kv_cache_dtype, instruction_set=instruction_set)
    assert_near_oracle(model, tensors, _random_steps(rng, config), TOLERANCE[quantization, kv_cache_dtype])
