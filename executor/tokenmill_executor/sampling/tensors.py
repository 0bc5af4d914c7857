"""Chooses tokens with torch, on any device; the reference of the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill_executor.runner import SampledLogprobs, SamplingInput, SamplingParams
from tokenmill_executor.sampling.choices import Choices, is_greedy, is_plain
from tokenmill_executor.sampling.draw import Truncation, draw, draw_truncated
from tokenmill_executor.sampling.edits import edit_logits, edits_logits
from tokenmill_executor.sampling.uniform import uniforms
from tokenmill_executor.upload import floats, integers, upload


def choose(logits: torch.Tensor, samples: Sequence[SamplingInput], eos_token_ids: tuple[int, ...]) -> Choices:
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
        tokens[rows] = _draw_random(edited, maxima[rows], tokens[rows], chosen)
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


def _draw_random(
    logits: torch.Tensor, maxima: torch.Tensor, greedy: torch.Tensor, samples: Sequence[SamplingInput]
) -> torch.Tensor:
    """[rows] tokens: `greedy` where temperature is 0, else drawn."""
    tokens = greedy.clone()
    for truncated in (False, True):
        chosen = [
            row for row, sample in enumerate(samples) if not is_greedy(sample.params) and _is_truncated(sample.params) == truncated
        ]
        if not chosen:
            continue
        rows = integers(chosen, logits.device)
        params = [samples[row].params for row in chosen]
        numbers = uniforms([param.seed for param in params], [len(samples[row].token_ids) for row in chosen])
        uniform = upload(numbers, logits.device)
        temperature = floats([param.temperature for param in params], logits.device)
        taken = logits if len(chosen) == len(samples) else logits.index_select(0, rows)
        scaled = (taken - maxima[rows, None]).div_(temperature[:, None])
        tokens[rows] = draw_truncated(scaled, _truncation(params, logits.device), uniform) if truncated else draw(scaled, uniform)
    return tokens


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _truncation(params: Sequence[SamplingParams], device: torch.device) -> Truncation:
    return Truncation(
        top_k=integers([param.top_k for param in params], device),
        top_p=floats([param.top_p for param in params], device),
        min_p=floats([param.min_p for param in params], device),
    )


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
