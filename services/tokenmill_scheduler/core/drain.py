"""How fast a queue empties: requests and tokens that leave it per second, of late. Must not know: why they leave, the time."""

from __future__ import annotations

from math import exp, expm1

# What happened so long ago weighs a third of what happens now.
MEMORY_S = 10.0
# What happens in the first moments fills what was free, and says little of what follows: it counts as spread over this time.
LEAST_HISTORY_S = 1.0


class Rate:
    """An exponentially weighted mean of events per second; right, too, when there is less history than it remembers."""

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._since_s: float | None = None
        self._at_s = 0.0
        self._weight = 0.0

    def add(self, count: float, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = self._at_s = now_s
        self._weight = self._weight * exp((self._at_s - now_s) / self._memory_s) + count
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        """0 before anything has been counted."""
        if self._since_s is None or now_s <= self._since_s:
            return 0.0
        weight = self._weight * exp((self._at_s - now_s) / self._memory_s)
        history_s = max(now_s - self._since_s, LEAST_HISTORY_S)
        return weight / (self._memory_s * -expm1(-history_s / self._memory_s))


class Drain:
    """Of one queue."""

    def __init__(self) -> None:
        self.requests = Rate()
        self.tokens = Rate()

    def left(self, tokens: int, now_s: float) -> None:
        """One request of so many tokens is in the queue no more."""
        self.requests.add(1, now_s)
        self.tokens.add(tokens, now_s)
