"""How long outputs turn out, learnt from those that ended by themselves: what a request will probably make, whatever it asks for.

Clients set max_tokens carelessly, so it says little. Kept is a window of the latest outputs of each tenant at each model, and of
all tenants at each model for those not seen before; asked is a quantile of it. Must not know: requests, queues, blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

WINDOW = 128
# Fewer than these say nothing yet.
ENOUGH = 8
# Tenants come and go: those that ended something the longest time ago are forgotten.
MAX_WINDOWS = 1_000
EVERYONE = ""


class _Window:
    """The latest WINDOW lengths, in order of arrival and sorted."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, length: int) -> None:
        if len(self._latest) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(length)
        insort(self._sorted, length)

    def quantile(self, share: float) -> int:
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]


class OutputLengths:
    """Constant time and memory an observation. `expected` is None until enough has been seen."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, str], _Window] = {}

    def observe(self, tenant: str, model: str, length: int) -> None:
        """Output of a request that ended by itself; one that was cut short says nothing of its length."""
        for key in ((tenant, model), (EVERYONE, model)):
            window = self._windows.pop(key, None) or _Window()
            window.add(length)
            self._windows[key] = window
        while len(self._windows) > MAX_WINDOWS:
            del self._windows[next(iter(self._windows))]

    def expected(self, tenant: str, model: str, share: float = 0.5) -> int | None:
        """Tokens that this share of the tenant's outputs does not exceed; of everybody's while the tenant's are too few."""
        for key in ((tenant, model), (EVERYONE, model)):
            window = self._windows.get(key)
            if window is not None and len(window) >= ENOUGH:
                return window.quantile(share)
        return None
