"""`TorchRunner`: a `Model` and a sampler as the `Runner` that the engine drives.

Must not know: plans, blocks beyond their size, where a model's files come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.model.device import CudaClock, HostClock, StepClock, first_line, is_lost, is_out_of_memory
from tokenmill_executor.model.host_memory import TorchHostMemory
from tokenmill_executor.model.pages import populate
from tokenmill_executor.model.port import Decodes, Model
from tokenmill_executor.runner import Batch, DeviceLost, HostMemory, RunnerDescription, SamplingInput, SamplingParams, StepOutput
from tokenmill_executor.sampling import MakeDraws, Sampler, SamplingKernels, TorchDraws, only_draws


class TorchRunner:
    """`measure_memory` gives the bytes for the KV cache; it may run the model, so it is called before `allocate`.

    `decodes` takes several steps where it can; without it each comes back to the engine. `make_draws` is the sampler's, see there.
    """

    def __init__(
        self,
        model: Model,
        description: RunnerDescription,
        tokenizer: Mapping[str, bytes],
        device: torch.device,
        measure_memory: Callable[[], int],
        sampling_kernels: SamplingKernels | None = None,
        decodes: Decodes | None = None,
        make_draws: MakeDraws = TorchDraws,
    ) -> None:
        self.description = description
        self._model = model
        self._sampler = Sampler(description.eos_token_ids, sampling_kernels, make_draws)
        self._decodes = decodes
        self._tokenizer = dict(tokenizer)
        self._device = device
        self._measure_memory = measure_memory
        self._pieces: Iterator[None] = iter(())
        self._clock: StepClock = CudaClock() if device.type == "cuda" else HostClock()

    def block_bytes(self, block_size: int) -> int:
        return self._model.block_bytes(block_size)

    def available_bytes(self) -> int:
        with self._telling_whether_it_is_lost(), self._telling_whether_it_is_full():
            return self._measure_memory()

    def allocate(self, num_blocks: int, block_size: int) -> None:
        with self._telling_whether_it_is_lost(), self._telling_whether_it_is_full():
            self._model.allocate(num_blocks, block_size)
            self._draw_once()
        if self._device.type == "cpu":
            self._pieces = populate(self._model.storage())

    @torch.inference_mode()
    def populate_some(self) -> bool:
        return next(self._pieces, self._pieces) is not self._pieces

    def host_memory(self, num_blocks: int) -> HostMemory:
        return TorchHostMemory(self._model.storage(), num_blocks, self._device)

    @torch.inference_mode()
    def step(self, batch: Batch) -> StepOutput:
        with self._telling_whether_it_is_lost():
            return self._step(batch)

    @torch.inference_mode()
    def steps(self, batch: Batch, most: int, interrupt: Interrupt) -> list[StepOutput]:
        with self._telling_whether_it_is_lost():
            if self._decodes is None or most == 1 or not all(map(only_draws, batch.samples)):
                return [self._step(batch)]
            return self._decodes.steps(batch, most, interrupt)

    @contextmanager
    def _telling_whether_it_is_lost(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if is_lost(self._device):
                raise DeviceLost(f"{self.description.device}: {error}") from error
            raise

    @contextmanager
    def _telling_whether_it_is_full(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise MemoryError(f"{self.description.device}: {first_line(error)}") from error
            raise

    @torch.inference_mode()
    def _draw_once(self) -> None:
        """What draws may have to be compiled first: now, and not while streams wait."""
        logits = torch.zeros((1, self.description.vocab_size), device=self._device)
        self._sampler.sample(logits, [SamplingInput(0, [0], 1, SamplingParams(max_tokens=1, seed=0, top_p=0.9))])

    def _step(self, batch: Batch) -> StepOutput:
        started_s, begin = time.perf_counter(), self._clock.mark()
        logits = self._model.forward(batch)
        end = self._clock.mark()
        output = self._sampler.sample(logits, batch.samples)
        # Only now: the sampler's read of the tokens is where the host waits for the device.
        output.forward_s = self._clock.seconds(begin, end)
        output.sample_s = max(0.0, time.perf_counter() - started_s - output.forward_s)
        return output

    def tokenizer_files(self) -> dict[str, bytes]:
        return self._tokenizer
