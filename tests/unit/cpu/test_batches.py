"""What the kernels refuse of a batch, before they read or write anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.cpu.small_models import (
    NUM_BLOCKS,
    cpu_model,
    make_batch,
    needs_kernels,
    random_tensors,
    random_tokens,
    scattered_tables,
    small_config,
)

pytestmark = needs_kernels


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("token_ids", 0, 301, "token id"),
        ("token_ids", 0, -1, "token id"),
        ("positions", 0, 1024, "position"),
        ("positions", 1, 3, "positions"),
        ("slots", (0, 2), NUM_BLOCKS * 16, "slot"),
        ("slots", (0, 2), -1, "slot"),
        ("block_tables", (0, 0, 0), NUM_BLOCKS, "block"),
        ("context_lens", 0, 49, "context"),
        ("query_starts", 1, 4, "query_starts"),
        ("query_starts", 0, 1, "query_starts"),
        ("sample_rows", 0, 1, "sample"),
        ("sample_rows", 0, -1, "sample"),
    ],
)
def test_an_index_outside_its_array_is_refused(field: str, index: object, value: int, message: str) -> None:
    config = small_config()
    model = cpu_model(config, random_tensors(config))
    batch = make_batch([(random_tokens(config, 3, 1), 3, scattered_tables(1, 40)[0])])
    getattr(batch, field)[index] = value
    with pytest.raises(ValueError, match=message):
        model.forward(batch)


@pytest.mark.parametrize(
    ("field", "index", "message"),
    [
        ("positions", np.s_[:-1], "number of tokens"),
        ("context_lens", np.s_[:-1], "number of tokens or sequences"),
        ("slots", np.s_[:, :-1], "slots"),
        ("slots", np.s_[:0], "slots"),
        ("block_tables", np.s_[:0], "slots"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(field: str, index: Any, message: str) -> None:
    config = small_config()
    model = cpu_model(config, random_tensors(config))
    batch = make_batch([(random_tokens(config, 3, row), 3, table) for row, table in enumerate(scattered_tables(2, 40))])
    setattr(batch, field, getattr(batch, field)[index])
    with pytest.raises(ValueError, match=message):
        model.forward(batch)


def test_a_batch_without_the_blocks_of_some_layers_is_refused() -> None:
    config = small_config(windows=(None, 20))
    model = cpu_model(config, random_tensors(config))
    batch = make_batch([(random_tokens(config, 3, 1), 3, scattered_tables(1, 40)[0])], groups=1)
    with pytest.raises(ValueError, match="lacks a group"):
        model.forward(batch)
