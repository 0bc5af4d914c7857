"""Random numbers that are a function of (seed, position) alone, so that a sequence draws alike in any batch and after any restart.

Source: SplitMix64 (Steele, Lea and Flood 2014), used as a hash of a counter (Salmon et al. 2011). Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenmill_executor.runner import SamplingInput

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BITS = 52


def uniforms(seeds: Sequence[int], positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each pair; multiples of 2^-52, so that times any total it stays below the total.

    Positions may have a dimension more than the seeds, in front.
    """
    keys = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
    counters = np.array(positions, dtype=np.uint64)
    hashed = _mix(_mix(keys + _GOLDEN) + (counters + np.uint64(1)) * _GOLDEN)
    return (hashed >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def uniforms_of_steps(samples: Sequence[SamplingInput], steps: int) -> npt.NDArray[np.float64]:
    """[steps, rows]: those of the next token of each sample, then of the ones that follow it."""
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64)
    return uniforms([sample.params.seed for sample in samples], lengths + np.arange(steps)[:, None])


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
