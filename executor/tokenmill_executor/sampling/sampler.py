"""Chooses the tokens of one step: edits, log probabilities, temperature, truncation, draw.

In the order of vLLM: logit bias, penalties, min_tokens; log probabilities of what that leaves; temperature, top-k, top-p, min-p.
The C++ kernels choose, on a CPU that runs them; everywhere else torch does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tokenmill_executor.runner import SamplingInput, StepOutput
from tokenmill_executor.sampling import tensors
from tokenmill_executor.sampling.choices import is_plain
from tokenmill_executor.sampling.draws import MakeDraws, TorchDraws
from tokenmill_executor.sampling.edits import edits_logits
from tokenmill_executor.sampling.kernels import SamplingKernels

NOT_A_NUMBER = "the model's logits are not numbers"
ALL_MASKED = "no token is left to sample: min_tokens and stop_token_ids rule out every one"


class Sampler:
    """`eos_token_ids` are what min_tokens masks beside a sequence's stop tokens; `kernels` choose from logits on a CPU.

    `make_draws` is for where torch chooses.
    """

    def __init__(
        self, eos_token_ids: tuple[int, ...], kernels: SamplingKernels | None = None, make_draws: MakeDraws = TorchDraws
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._make_draws = make_draws
        self._kernels = kernels

    def sample(self, logits: torch.Tensor, samples: Sequence[SamplingInput]) -> StepOutput:
        """[rows, vocab_size] float32, a row for each of `samples`. Does not change `logits`. Times are left 0."""
        if not samples:
            return StepOutput([])
        if self._kernels is None or logits.device.type != "cpu":
            choices = tensors.choose(logits, samples, self._eos_token_ids, self._make_draws)
        elif all(map(is_plain, samples)):
            choices = self._kernels.choose_largest(logits)
        else:
            choices = self._kernels.choose(logits, samples, self._eos_token_ids)
        errors = {row: _fault(samples[row], value) for row, value in enumerate(choices.largest) if not math.isfinite(value)}
        logprobs = {row: found for row, found in choices.logprobs.items() if row not in errors}
        return StepOutput(choices.tokens, logprobs=logprobs, errors=errors)


def _fault(sample: SamplingInput, largest: float) -> str:
    """Why a row whose largest logit is not finite cannot be sampled."""
    return ALL_MASKED if largest == -math.inf and edits_logits(sample) else NOT_A_NUMBER
