"""Chooses tokens from logits, for all rows of a step at once. `Sampler` is what the rest uses."""

from tokenmill_executor.sampling.sampler import Sampler

__all__ = ["Sampler"]
