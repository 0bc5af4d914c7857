"""A slow, plain reference of the sampler in numpy float64, for one row at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tokenmill_executor.runner import SamplingInput

Float64Array = npt.NDArray[np.float64]


def edited(logits: Float64Array, sample: SamplingInput, eos_token_ids: tuple[int, ...]) -> Float64Array:
    """Logits after bias, penalties and min_tokens."""
    params, logits = sample.params, logits.copy()
    known, output = list(sample.token_ids), list(sample.token_ids[sample.num_prompt_tokens :])
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in set(known):
        logits[token] = (
            logits[token] / params.repetition_penalty if logits[token] > 0 else logits[token] * params.repetition_penalty
        )
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        logits[[*eos_token_ids, *params.stop_token_ids]] = -np.inf
    return logits


def probabilities(logits: Float64Array, sample: SamplingInput) -> Float64Array:
    """Of edited logits: what the draw is from. Ties with the last kept token are kept."""
    params = sample.params
    if params.temperature == 0:
        return np.asarray(np.eye(len(logits))[logits.argmax()])
    current = softmax(logits / params.temperature)
    if params.top_k > 0:
        current = _keep(current, np.sort(current)[::-1][: params.top_k][-1])
    if params.top_p < 1:
        ordered = np.sort(current)[::-1]
        before = np.cumsum(ordered) - ordered
        current = _keep(current, ordered[before < params.top_p][-1])
    if params.min_p > 0:
        current = _keep(current, params.min_p * current.max() * (1 - 1e-9))
    return current


def invert(current: Float64Array, uniform: float) -> int:
    cumulative = current.cumsum()
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def softmax(logits: Float64Array) -> Float64Array:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def _keep(current: Float64Array, least: float) -> Float64Array:
    kept = np.where(current >= least, current, 0.0)
    return np.asarray(kept / kept.sum())
