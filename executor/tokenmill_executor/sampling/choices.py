"""What both ways of choosing tokens, torch and the C++ kernels, have in common: their result, and what parameters mean."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill_executor.runner import SampledLogprobs, SamplingInput, SamplingParams
from tokenmill_executor.sampling.edits import edits_logits

# Temperatures below are greedy, as in vLLM.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Choices:
    """Of each row its largest logit after edits and its token, which means nothing where that is not finite. `logprobs` by row."""

    largest: list[float]
    tokens: list[int]
    logprobs: dict[int, SampledLogprobs]


def is_plain(sample: SamplingInput) -> bool:
    """Whether its token is that of the largest logit as it is, and nothing else is asked for."""
    return is_greedy(sample.params) and only_draws(sample)


def only_draws(sample: SamplingInput) -> bool:
    """Whether its tokens, this one and all later ones, are drawn from logits as they are, and nothing else is asked for."""
    return sample.params.logprobs is None and not edits_logits(sample)


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < MIN_TEMPERATURE
