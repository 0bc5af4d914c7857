"""A step's cost from steps whose time is known: terms are told apart, none is negative, outliers do not count."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import numpy as np
import pytest
from tokenmill_simulator.cost import StepCost, StepLoad
from tokenmill_simulator.executor import step_load
from tokenmill_simulator.fit import fit

# A small model on two cores.
TRUE = StepCost(step_s=0.001, weights_s=0.0096, row_s=6e-4, decode_s=3e-4, kv_token_s=1e-6, pair_s=2e-7, chunk_s=3e-3)


def mixes() -> list[StepLoad]:
    """Chunks of many lengths after many contexts, alone and beside decodes, and decodes alone."""
    loads = []
    for chunk, after, decodes, context in product((0, 5, 30, 100, 500), (0, 700, 3000), (0, 1, 4, 8), (50, 900)):
        rows = [(context, 1)] * decodes + ([(after, chunk)] if chunk else [])
        if rows:
            start, counts = np.array(rows).T
            loads.append(step_load(start, counts))
    return loads


def test_a_fit_tells_terms_apart() -> None:
    fitted = fit(mixes(), [TRUE.seconds(load) for load in mixes()])
    for field in fields(StepCost):
        assert getattr(fitted.cost, field.name) == pytest.approx(getattr(TRUE, field.name), rel=1e-3)
    assert fitted.error < 1e-6


def test_short_steps_are_fitted_as_well_as_long_ones() -> None:
    """Every hundredth of a second is a share of a step: with one error in the long steps, the short ones come out right."""
    seconds = [TRUE.seconds(load) * (1.05 if load.prefill_tokens > 400 else 1.0) for load in mixes()]
    cost = fit(mixes(), seconds).cost
    for load in mixes():
        assert cost.seconds(load) == pytest.approx(TRUE.seconds(load), rel=0.06)


def test_a_slow_step_counts_like_a_fast_one() -> None:
    """What is foretold of many steps is what they take together."""
    loads = [StepLoad(0, 4, 100, 0, 0)] * 8
    cost = fit(loads, [0.008, 0.008, 0.008, 0.014] * 2).cost
    assert cost.seconds(loads[0]) == pytest.approx(0.0095)


def test_steps_that_were_held_up_are_left_out() -> None:
    """The first one touches memory for the first time; another waited for a processor."""
    seconds = [TRUE.seconds(load) for load in mixes()]
    seconds[0] *= 16
    seconds[40] *= 4
    fitted = fit(mixes(), seconds)
    assert (fitted.outliers, fitted.steps) == (2, len(seconds))
    for field in fields(StepCost):
        assert getattr(fitted.cost, field.name) == pytest.approx(getattr(TRUE, field.name), rel=1e-3)


def test_steps_that_differ_in_nothing_give_a_cost_without_negative_terms() -> None:
    cost = fit([StepLoad(0, 4, 100, 0, 0)] * 5, [0.01] * 5).cost
    assert min(cost.step_s, cost.row_s, cost.decode_s, cost.kv_token_s) >= 0
    assert cost.seconds(StepLoad(0, 4, 100, 0, 0)) == pytest.approx(0.01)
