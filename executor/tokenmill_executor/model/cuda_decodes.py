"""Decode steps one after another whose tokens the host sees late: a step is launched from what the one before it has sampled on the
device, and only then does the host look at what that was.

    host      launch 0, launch 1, read 0, launch 2, read 1, launch 3, read 2, …
    device    ─── step 0 ──────── ─── step 1 ────── ─── step 2 ──────

So the device goes from step to step without a gap, and an end is heeded a step late. Whatever else a step needs the host knows
beforehand: positions, contexts, slots, the numbers that tokens are drawn with. All of it is queued on one stream, so what a step
reads is overwritten behind it and not before.

Must not know: CUDA itself (`StepClock` and `Fetch` do), graphs, attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.model.device import Download, Fetch, StepClock
from tokenmill_executor.model.port import DecodeModel
from tokenmill_executor.runner import Batch, SamplingInput, StepOutput
from tokenmill_executor.sampling import NOT_A_NUMBER, Draws, MakeDraws
from tokenmill_executor.upload import upload


class CudaDecodes:
    """`make_draws` makes such as wait for nothing on the device."""

    def __init__(self, model: DecodeModel, make_draws: MakeDraws, device: torch.device, clock: StepClock, fetch: Fetch) -> None:
        self._model = model
        self._make_draws = make_draws
        self._device = device
        self._clock = clock
        self._fetch = fetch

    def steps(self, batch: Batch, most: int, interrupt: Interrupt) -> list[StepOutput]:
        """See `model.port.Decodes`. Ends a step behind the one in which a sequence ends or cannot be sampled."""
        draws = self._make_draws(batch.samples, most, self._device)
        running = self._launch(0, batch, upload(batch.token_ids, self._device), draws)
        outputs: list[StepOutput] = []
        for step in range(1, most):
            if interrupt.is_asked():
                break
            following = self._launch(step, _following(batch, step, self._model.block_size), running.tokens, draws)
            outputs.append(self._read(running))
            running = following
            if _any_over(batch.samples, outputs[-1]):
                break
        outputs.append(self._read(running))
        self._erase(batch, outputs)
        return outputs

    def _launch(self, step: int, batch: Batch, token_ids: torch.Tensor, draws: Draws) -> _Launched:
        """Of these tokens, [S] on the device."""
        begin = self._clock.mark()
        logits = self._model.decode(batch, token_ids)
        computed = self._clock.mark()
        maxima, greedy = logits.max(dim=-1)
        tokens = draws.draw(step, logits, maxima, greedy)
        end = self._clock.mark()
        # One copy for both.
        return _Launched(tokens, self._fetch(torch.stack((tokens.int(), maxima.view(torch.int32)))), begin, computed, end)

    def _read(self, launched: _Launched) -> StepOutput:
        """Waits for the step, and not for the one that is launched behind it."""
        tokens, bits = launched.download.wait().numpy()
        return StepOutput(
            tokens.tolist(),
            errors={row: NOT_A_NUMBER for row, value in enumerate(bits.view(np.float32).tolist()) if not math.isfinite(value)},
            forward_s=self._clock.seconds(launched.begin, launched.computed),
            sample_s=self._clock.seconds(launched.computed, launched.end),
        )

    def _erase(self, batch: Batch, outputs: Sequence[StepOutput]) -> None:
        """Steps before those that cannot be sampled have stored what is right, and stays."""
        for step, output in enumerate(outputs):
            if output.errors:
                self._model.erase(_following(batch, step, self._model.block_size), list(output.errors))


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on the device: its tokens, [S] int64, there and, above the bits of the largest logits, on their way to the host."""

    tokens: torch.Tensor
    download: Download
    begin: object
    computed: object
    end: object


def _following(batch: Batch, steps: int, block_size: int) -> Batch:
    """The batch of decodes so many steps later, with the same block tables; its tokens are not known to the host."""
    positions = batch.positions + np.int32(steps)
    blocks = batch.block_tables[:, np.arange(len(positions)), positions // block_size]
    return replace(
        batch,
        positions=positions,
        context_lens=batch.context_lens + np.int32(steps),
        slots=blocks * np.int32(block_size) + positions % np.int32(block_size),
    )


def _any_over(samples: Sequence[SamplingInput], output: StepOutput) -> bool:
    return bool(output.errors) or any(token in sample.ends for sample, token in zip(samples, output.token_ids, strict=True))
