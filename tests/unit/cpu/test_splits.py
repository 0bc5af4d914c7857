"""Decodes whose contexts are long enough to be split, each into several items of attention that are merged after."""

from __future__ import annotations

import pytest
import torch

from tests.unit.cpu.small_models import (
    TOLERANCE,
    assert_near_oracle,
    cpu_model,
    make_batch,
    needs_kernels,
    random_tensors,
    random_tokens,
    runnable_sets,
    scattered_tables,
    small_config,
)

pytestmark = needs_kernels

LENGTHS = (513, 40, 769)  # split into 2, 1 and 3


@pytest.mark.parametrize("instruction_set", runnable_sets)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_several_of_them_in_a_step_are_near_float32(instruction_set: str, kv_cache_dtype: str) -> None:
    config = small_config(num_heads=4)
    tensors = random_tensors(config)
    tables = scattered_tables(len(LENGTHS), max(LENGTHS))
    model = cpu_model(config, tensors, kv_cache_dtype=kv_cache_dtype, instruction_set=instruction_set)
    known = [(random_tokens(config, length, length), table) for length, table in zip(LENGTHS, tables, strict=True)]
    prompts = make_batch([(tokens[:-1], len(tokens) - 1, table) for tokens, table in known])
    decodes = make_batch([(tokens, 1, table) for tokens, table in known])
    assert_near_oracle(model, tensors, [prompts, decodes], TOLERANCE[None, kv_cache_dtype])


def test_scores_that_lie_far_apart_stay_numbers() -> None:
    """Of one split all weigh nothing beside those of another; powers of 2 of such differences are none."""
    config = small_config()
    tensors = random_tensors(config)
    for layer in range(config.num_layers):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] *= 1000
    model = cpu_model(config, tensors)
    tokens, table = random_tokens(config, 800, 2), scattered_tables(1, 800)[0]
    model.forward(make_batch([(tokens[:-1], 799, table)]))
    assert torch.isfinite(model.forward(make_batch([(tokens, 1, table)]))).all()


def test_a_chunk_is_not_split_whatever_of_it_is_left_for_its_last_item() -> None:
    """So that a long prompt, too, is the same to the bit in chunks and whole."""
    config = small_config(num_heads=6)
    model = cpu_model(config, random_tensors(config))
    length = 28 * (64 // 3) + 1  # an item has 64 rows, three heads each: one token is left for the last
    tokens, tables = random_tokens(config, length, 1), scattered_tables(2, length)
    whole = model.forward(make_batch([(tokens, length, tables[0])])).clone()
    for end, new in ((150, 150), (length, length - 150)):
        chunked = model.forward(make_batch([(tokens[:end], new, tables[1])]))
    assert torch.equal(chunked, whole)
