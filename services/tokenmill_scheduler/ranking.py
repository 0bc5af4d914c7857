"""Which of the choices that ran are the best: by mean log probability of their tokens. Pure.

The mean, not the sum, so that a longer choice is not the worse for it. From stored tokens alone, so it comes out alike wherever and
whenever it is asked. Must not know: streams, text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill_scheduler.core.plans import TokenLogprobs
from tokenmill_scheduler.core.request import State


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice that has ended; `logprobs` has one entry for each of its tokens."""

    state: State
    logprobs: Sequence[TokenLogprobs]

    @property
    def mean_logprob(self) -> float:
        """Of a choice without tokens, less than of any other."""
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs) if self.logprobs else float("-inf")


def best(candidates: Sequence[Candidate], n: int) -> list[int]:
    """The places of the `n` best, the best first: those that are DONE before others, ties by place."""
    places = range(len(candidates))
    return sorted(places, key=lambda place: (candidates[place].state is not State.DONE, -candidates[place].mean_logprob, place))[:n]
