"""A step's cost, fitted to steps that were measured. Must not know: where steps come from.

By least squares of relative errors, without negative terms. Reading the weights and computing rows make one column once it is known
from how many rows on the linear layers compute (the ridge of the roofline); of all ridges that fits best which leaves least. Steps
that took far longer than their like, for memory that was touched first or a processor that others had, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill_simulator.cost import StepCost, StepLoad

Floats = NDArray[np.float64]
_RIDGES = (0.0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512)


# A step that is off by more than this factor is none that a cost should tell.
_OUTLIER = 2.0


@dataclass(frozen=True, slots=True)
class Fit:
    """`error`: how far the cost is from a step, as a share of that step (root of the mean square), over all `steps` but the
    `outliers`."""

    cost: StepCost
    steps: int
    error: float
    outliers: int = 0


def fit(loads: Sequence[StepLoad], seconds: Sequence[float]) -> Fit:
    """Weights' reading time that no step tells from the fixed cost of a step is in that. Raises ValueError without steps."""
    if not loads:
        raise ValueError("there is no step whose time is known")
    measured = np.array(seconds)
    # As shares of what was measured the errors of slow steps are never above 1, so outliers hardly count; but any slow step counts
    # less than a fast one, and the cost comes out low. Among like steps, shares of what is expected give their mean.
    rough = _best(loads, measured, measured)
    expected = _expected(rough, loads)
    usual = np.flatnonzero((measured < _OUTLIER * expected) & (expected < _OUTLIER * measured)).tolist()
    if usual:
        loads, measured, expected = [loads[place] for place in usual], measured[usual], expected[usual]
    cost = _best(loads, measured, expected)
    off = measured / _expected(cost, loads) - 1
    return Fit(cost, len(seconds), float(np.sqrt((off**2).mean())), len(seconds) - len(loads))


def _expected(cost: StepCost, loads: Sequence[StepLoad]) -> Floats:
    return np.array([cost.seconds(load) for load in loads])


def _best(loads: Sequence[StepLoad], measured: Floats, scale: Floats) -> StepCost:
    """Errors count as shares of `scale`. Among equals the least ridge."""
    rows = np.array([load.prefill_tokens + load.decode_tokens for load in loads], dtype=float)
    others = np.array([(1, load.decode_tokens, load.kv_tokens, load.pairs, load.chunks) for load in loads], dtype=float)
    found: list[tuple[float, float, list[float]]] = []
    for ridge in _RIDGES:
        if ridge and not rows.min() < ridge < rows.max():
            continue
        columns = np.column_stack((np.maximum(ridge, rows), others)) / scale[:, None]
        terms = _non_negative(columns, measured / scale)
        left = float(((columns @ terms - measured / scale) ** 2).sum())
        found.append((left, ridge, terms.tolist()))
    _, ridge, (row_s, step_s, decode_s, kv_s, pair_s, chunk_s) = min(found)
    return StepCost(step_s, ridge * row_s, row_s, decode_s, kv_s, pair_s, chunk_s)


def _non_negative(columns: Floats, measured: Floats) -> Floats:
    """Least squares, leaving out the most negative term until none is: terms that the steps do not tell apart end at 0."""
    scale = np.maximum(columns.max(axis=0), np.finfo(float).tiny)
    used = list(range(columns.shape[1]))
    solution = np.zeros(columns.shape[1])
    while used:
        part = np.linalg.lstsq(columns[:, used] / scale[used], measured, rcond=None)[0]
        if part.min() >= 0:
            solution[used] = part / scale[used]
            break
        del used[int(part.argmin())]
    return solution
