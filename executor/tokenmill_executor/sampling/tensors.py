"""Chooses tokens with torch, on any device; the reference of the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill_executor.runner import SampledLogprobs, SamplingInput
from tokenmill_executor.sampling.choices import Choices, is_plain
from tokenmill_executor.sampling.draws import MakeDraws, TorchDraws
from tokenmill_executor.sampling.edits import edit_logits, edits_logits
from tokenmill_executor.upload import integers


def choose(
    logits: torch.Tensor, samples: Sequence[SamplingInput], eos_token_ids: tuple[int, ...], make_draws: MakeDraws = TorchDraws
) -> Choices:
    """[rows, vocab_size] float32, which stay as they are."""
    maxima, tokens = _largest(logits)
    special = [row for row, sample in enumerate(samples) if not is_plain(sample)]
    logprobs: dict[int, SampledLogprobs] = {}
    if special:
        rows = integers(special, logits.device)
        chosen = [samples[row] for row in special]
        edited = logits
        if len(special) < len(samples) or any(map(edits_logits, samples)):
            edited = logits.index_select(0, rows)
            edit_logits(edited, chosen, eos_token_ids)
            maxima[rows], tokens[rows] = _largest(edited)
        tokens[rows] = make_draws(chosen, 1, logits.device).draw(0, edited, maxima[rows], tokens[rows])
        logprobs = {special[index]: found for index, found in _logprobs(edited, tokens[rows], chosen).items()}
    # One read for both: each waits for the device. Token ids are exact in float64.
    largest, chosen_tokens = torch.stack((maxima.double(), tokens.double())).tolist()
    return Choices(largest, [int(token) for token in chosen_tokens], logprobs)


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest value, not a number if there is one, and its first place. numpy looks ten times faster than torch."""
    if logits.device.type != "cpu":
        maxima, tokens = logits.max(dim=-1)
        return maxima, tokens
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(1, tokens[:, None]).squeeze(1), tokens


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, samples: Sequence[SamplingInput]) -> dict[int, SampledLogprobs]:
    asked = {row: sample.params.logprobs for row, sample in enumerate(samples) if sample.params.logprobs is not None}
    if not asked:
        return {}
    rows = integers(list(asked), logits.device)
    taken = logits if len(asked) == len(samples) else logits.index_select(0, rows)
    distribution = taken.log_softmax(dim=-1)
    sampled = distribution.gather(1, tokens[rows, None]).squeeze(1).tolist()
    top, top_tokens = (part.tolist() for part in distribution.topk(min(max(asked.values()), logits.shape[1]), dim=-1))
    return {
        row: SampledLogprobs(sampled[place], tuple(zip(top_tokens[place][:count], top[place][:count], strict=True)))
        for place, (row, count) in enumerate(asked.items())
    }
