"""In what order one plan looks at the waiting requests: that of the queue, or the longest predicted prefix hit first.

Longest prefix match is SGLang's (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024).
Here it looks at the first WINDOW of the queue only, so that a step's cost is bounded, and nobody is overtaken more often than
allowed, so that a request that is like no other runs too. Must not know: executors, blocks, budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.request import State

WINDOW = 128


class Lineup:
    """Iterates over `waiting`, soonest first. With `hit`, longest hits come first, behind preempted requests and such as have been
    overtaken `most_overtaken` times."""

    def __init__(self, waiting: Iterable[LiveRequest], hit: Callable[[LiveRequest], int] | None, most_overtaken: int) -> None:
        queued = iter(waiting)
        window = list(islice(queued, WINDOW if hit is not None else 0))
        self._rest = list(queued)
        self._most_overtaken = most_overtaken
        # Place in the queue and predicted hit; dictionaries for look-up only.
        self._places = {live: place for place, live in enumerate(window)}
        self._hits = {live: hit(live) for live in window} if hit is not None else {}
        # Soonest last, to be popped.
        self._ahead = window
        self._sort()

    def __iter__(self) -> Iterator[LiveRequest]:
        while self._ahead:
            yield self._ahead.pop()
        yield from self._rest

    def admitted(self, live: LiveRequest) -> None:
        """Counts an admission for each one that was before it in the queue and has not been looked at."""
        place = self._places.get(live, 0)
        aged = False
        for earlier in self._ahead:
            if self._places[earlier] < place:
                earlier.overtaken += 1
                aged = aged or earlier.overtaken == self._most_overtaken
        if aged:
            self._sort()

    def _sort(self) -> None:
        self._ahead.sort(key=self._turn, reverse=True)

    def _turn(self, live: LiveRequest) -> tuple[bool, int, int]:
        by_hit = live.state is not State.PREEMPTED and live.overtaken < self._most_overtaken
        return (by_hit, -self._hits[live] if by_hit else 0, self._places[live])
