"""Chooses tokens from logits, for all rows of a step at once. `Sampler` is what the rest uses; with
`available_kernels` it is fast on a CPU."""

from tokenmill_executor.sampling.kernels import SamplingKernels, available_kernels
from tokenmill_executor.sampling.sampler import Sampler

__all__ = ["Sampler", "SamplingKernels", "available_kernels"]
