"""How rows are drawn, in one step or in several: all that the host knows of them is on the device before the first.

Must not know: edits, log probabilities, batches, steps of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill_executor.runner import SamplingInput, SamplingParams
from tokenmill_executor.sampling.choices import is_greedy
from tokenmill_executor.sampling.draw import WIDTHS, Truncation, draw, draw_truncated
from tokenmill_executor.sampling.uniform import uniforms_of_steps
from tokenmill_executor.upload import floats, integers, upload


class Draws(Protocol):
    def draw(self, step: int, logits: torch.Tensor, maxima: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size] float32, of each row the largest and its token int64 → tokens [rows], in the step of that number.

        Steps count from 0. A token is `greedy`'s where temperature is 0.
        """


class MakeDraws(Protocol):
    def __call__(self, samples: Sequence[SamplingInput], steps: int, device: torch.device) -> Draws:
        """Of these rows, in the next step and those that follow."""


class TorchDraws:
    """In torch, on any device. Truncated rows are looked at in `widths`, see `draw_truncated`: without any it never waits."""

    def __init__(
        self, samples: Sequence[SamplingInput], steps: int, device: torch.device, widths: tuple[int, ...] = WIDTHS
    ) -> None:
        self._count = len(samples)
        self._widths = widths
        self._kinds = list(_kinds(samples, steps, device))

    def draw(self, step: int, logits: torch.Tensor, maxima: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
        tokens = greedy.clone()
        for kind in self._kinds:
            rows, uniform = kind.rows, kind.uniform[step]
            taken = logits if len(rows) == self._count else logits.index_select(0, rows)
            scaled = (taken - maxima[rows, None]).div_(kind.temperature[:, None])
            if kind.truncation is None:
                tokens[rows] = draw(scaled, uniform)
            else:
                tokens[rows] = draw_truncated(scaled, kind.truncation, uniform, self._widths)
        return tokens


@dataclass(frozen=True, slots=True)
class _Kind:
    """Rows that are drawn alike. rows [n] int64, temperature [n] float32, uniform [steps, n] float64."""

    rows: torch.Tensor
    temperature: torch.Tensor
    uniform: torch.Tensor
    truncation: Truncation | None


def _kinds(samples: Sequence[SamplingInput], steps: int, device: torch.device) -> Iterator[_Kind]:
    for truncated in (False, True):
        chosen = [
            row for row, sample in enumerate(samples) if not is_greedy(sample.params) and is_truncated(sample.params) == truncated
        ]
        if not chosen:
            continue
        params = [samples[row].params for row in chosen]
        yield _Kind(
            rows=integers(chosen, device),
            temperature=floats([param.temperature for param in params], device),
            uniform=upload(uniforms_of_steps([samples[row] for row in chosen], steps), device),
            truncation=_truncation(params, device) if truncated else None,
        )


def is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _truncation(params: Sequence[SamplingParams], device: torch.device) -> Truncation:
    return Truncation(
        top_k=integers([param.top_k for param in params], device),
        top_p=floats([param.top_p for param in params], device),
        min_p=floats([param.min_p for param in params], device),
    )
