"""Changes to logits before anything is drawn: bias, penalties, and end-of-sequence tokens masked until `min_tokens`.

Each is written as a list of (row, token) places over the whole batch, so that it costs a few tensor operations a step, not a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tokenmill_executor.runner import SamplingInput, SamplingParams
from tokenmill_executor.upload import floats, integers, upload


def edits_logits(sample: SamplingInput) -> bool:
    params = sample.params
    return bool(params.logit_bias) or _penalizes(params) or _output_len(sample) < params.min_tokens


def edit_logits(logits: torch.Tensor, samples: Sequence[SamplingInput], eos_token_ids: tuple[int, ...]) -> None:
    """In place; [rows, vocab_size] float32, a row for each of `samples`."""
    _add_biases(logits, samples)
    _penalize(logits, samples)
    _mask_ends(logits, samples, eos_token_ids)


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _output_len(sample: SamplingInput) -> int:
    return len(sample.token_ids) - sample.num_prompt_tokens


def _add_biases(logits: torch.Tensor, samples: Sequence[SamplingInput]) -> None:
    places = [(row, token, bias) for row, sample in enumerate(samples) for token, bias in sample.params.logit_bias]
    if places:
        rows, tokens, biases = zip(*places, strict=True)
        logits.index_put_(_places(logits, rows, tokens), floats(biases, logits.device), accumulate=True)


def _penalize(logits: torch.Tensor, samples: Sequence[SamplingInput]) -> None:
    """Repetition (Keskar et al. 2019) over all known tokens; then frequency and presence, as OpenAI's API, over the output."""
    penalized = [(row, sample) for row, sample in enumerate(samples) if _penalizes(sample.params)]
    if not penalized:
        return
    counted = [_counts_of(sample) for _, sample in penalized]
    sizes = [len(counts) for counts in counted]
    device = logits.device
    # Repeated here, for each distinct token: on a device that would first have to tell how long the result is.
    rows = upload(np.repeat([row for row, _ in penalized], sizes), device)
    repetition, frequency, presence = (
        upload(np.repeat(np.array(values, dtype=np.float32), sizes), device)
        for values in (
            [sample.params.repetition_penalty for _, sample in penalized],
            [sample.params.frequency_penalty for _, sample in penalized],
            [sample.params.presence_penalty for _, sample in penalized],
        )
    )
    tokens = upload(np.concatenate([counts.tokens for counts in counted]), device)
    outputs = upload(np.concatenate([counts.outputs for counts in counted]), device)
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, tokens] = values - frequency * outputs - presence * (outputs > 0)


def _mask_ends(logits: torch.Tensor, samples: Sequence[SamplingInput], eos_token_ids: tuple[int, ...]) -> None:
    places = [
        (row, token)
        for row, sample in enumerate(samples)
        if _output_len(sample) < sample.params.min_tokens
        for token in (*eos_token_ids, *sample.params.stop_token_ids)
    ]
    if places:
        rows, tokens = zip(*places, strict=True)
        logits[_places(logits, rows, tokens)] = -torch.inf


def _places(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return integers(rows, logits.device), integers(tokens, logits.device)


class TokenCounts:
    """The distinct known tokens of a sequence, and how often each is in the output; grows with the sequence."""

    __slots__ = ("_outputs", "_places", "_seen", "_tokens")

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._tokens = np.zeros(64, dtype=np.int64)
        self._outputs = np.zeros(64, dtype=np.float32)
        self._seen = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def tokens(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self._tokens[: len(self)]

    @property
    def outputs(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return self._outputs[: len(self)]

    def update(self, sample: SamplingInput) -> None:
        """Takes in what the sequence knows beyond what was taken in before."""
        for index in range(self._seen, len(sample.token_ids)):
            place = self._place(sample.token_ids[index])
            self._outputs[place] += index >= sample.num_prompt_tokens
        self._seen = len(sample.token_ids)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._outputs = np.concatenate([self._outputs, np.zeros_like(self._outputs)])
        self._tokens[place] = token
        return place


def _counts_of(sample: SamplingInput) -> TokenCounts:
    """Kept with the sequence, so that a step counts only the tokens that are new, and gone when the sequence is."""
    if sample.memo is None:
        sample.memo = TokenCounts()
    assert isinstance(sample.memo, TokenCounts)
    sample.memo.update(sample)
    return sample.memo
