"""A result in the making: what the steps of one plan have done for each of its sequences.

Must not know: the pool, runners' insides, how a step is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from tokenmill_executor.records import Fault
from tokenmill_executor.runner import SampledLogprobs


@dataclass(slots=True)
class Columns:
    """One entry for each of the plan's advances, and what all its `steps` so far have taken."""

    num_computed: list[int]
    finishes: list[int]
    num_cached: list[int]
    # Of each entry, as they were made.
    _tokens: list[list[int]]
    _logprobs: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    steps: int = 0
    forward_s: float = 0.0
    sample_s: float = 0.0

    @classmethod
    def of(cls, entries: int) -> Columns:
        return cls([0] * entries, [0] * entries, [0] * entries, [[] for _ in range(entries)])

    def sampled(self, entry: int, token_ids: Iterable[int], logprobs: Iterable[SampledLogprobs]) -> None:
        self._tokens[entry] += token_ids
        if logprobs:
            self._logprobs.setdefault(entry, []).extend(logprobs)

    @property
    def num_sampled(self) -> list[int]:
        return [len(tokens) for tokens in self._tokens]

    @property
    def token_ids(self) -> list[int]:
        """A sequence's tokens side by side, in the order of the sequences."""
        return list(chain.from_iterable(self._tokens))

    @property
    def logprobs(self) -> list[SampledLogprobs]:
        """Of those tokens that have some, in the same order."""
        return [logprobs for entry in sorted(self._logprobs) for logprobs in self._logprobs[entry]]
