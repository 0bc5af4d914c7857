"""A result in the making: what the steps of one plan have done for each of its sequences.

Must not know: the pool, runners' insides, how a step is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeVar

from tokenmill_executor.records import Fault
from tokenmill_executor.runner import SampledLogprobs

T = TypeVar("T")


@dataclass(slots=True)
class Columns:
    """One entry for each of the plan's advances, and what all its `steps` so far have taken."""

    num_computed: list[int]
    num_sampled: list[int]
    finishes: list[int]
    num_cached: list[int]
    faults: list[Fault] = field(default_factory=list)
    steps: int = 0
    forward_s: float = 0.0
    sample_s: float = 0.0
    # As they were made; each with the entry of its sequence.
    _tokens: list[tuple[int, int]] = field(default_factory=list)
    _logprobs: list[tuple[int, SampledLogprobs]] = field(default_factory=list)

    @classmethod
    def of(cls, entries: int) -> Columns:
        return cls([0] * entries, [0] * entries, [0] * entries, [0] * entries)

    def sampled(self, entry: int, token_id: int, logprobs: SampledLogprobs | None) -> None:
        self.num_sampled[entry] += 1
        self._tokens.append((entry, token_id))
        if logprobs is not None:
            self._logprobs.append((entry, logprobs))

    @property
    def token_ids(self) -> list[int]:
        """A sequence's tokens side by side, in the order of the sequences."""
        return [token_id for _, token_id in self._by_sequence(self._tokens)]

    @property
    def logprobs(self) -> list[SampledLogprobs]:
        return [logprobs for _, logprobs in self._by_sequence(self._logprobs)]

    def _by_sequence(self, made: list[tuple[int, T]]) -> list[tuple[int, T]]:
        """One step makes them in this order, several do it again and again."""
        return made if self.steps <= 1 else sorted(made, key=itemgetter(0))
