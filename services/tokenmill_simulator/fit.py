"""A step's cost, fitted to steps that were measured: non-negative least squares. Must not know: where steps come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill_simulator.cost import StepCost, StepLoad


@dataclass(frozen=True, slots=True)
class Fit:
    """`error`: how far the cost is from a step, as a share of the mean step, over all steps (root of the mean square)."""

    cost: StepCost
    steps: int
    error: float


def fit(loads: Sequence[StepLoad], seconds: Sequence[float]) -> Fit:
    """Weights' reading time cannot be told from the fixed cost of a step: it is in it. Raises ValueError without steps."""
    if not loads:
        raise ValueError("there is no step whose time is known")
    columns = np.array([(1, load.prefill_tokens, load.decode_tokens, load.kv_tokens, load.pairs) for load in loads], dtype=float)
    measured = np.array(seconds)
    step_s, prefill_s, decode_s, kv_s, pair_s = _non_negative(columns, measured).tolist()
    cost = StepCost(step_s, 0.0, prefill_s, decode_s, kv_s, pair_s)
    off = np.array([cost.seconds(load) for load in loads]) - measured
    return Fit(cost, len(loads), float(np.sqrt((off**2).mean()) / measured.mean()))


def _non_negative(columns: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares, leaving out the most negative term until none is: terms that the steps do not tell apart end at 0."""
    scale = np.maximum(columns.max(axis=0), 1.0)
    used = list(range(columns.shape[1]))
    solution = np.zeros(columns.shape[1])
    while used:
        part = np.linalg.lstsq(columns[:, used] / scale[used], measured, rcond=None)[0]
        if part.min() >= 0:
            solution[used] = part / scale[used]
            break
        del used[int(part.argmin())]
    return solution
