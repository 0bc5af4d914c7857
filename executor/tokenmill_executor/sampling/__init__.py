"""Chooses tokens from logits, for all rows of a step at once. `Sampler` is what the rest uses; with
`available_kernels` it is fast on a CPU."""

from tokenmill_executor.sampling.choices import only_draws
from tokenmill_executor.sampling.draws import Draws, MakeDraws, TorchDraws
from tokenmill_executor.sampling.kernels import SamplingKernels, available_kernels, records_of_steps
from tokenmill_executor.sampling.sampler import NOT_A_NUMBER, Sampler

__all__ = [
    "NOT_A_NUMBER",
    "Draws",
    "MakeDraws",
    "Sampler",
    "SamplingKernels",
    "TorchDraws",
    "available_kernels",
    "only_draws",
    "records_of_steps",
]
