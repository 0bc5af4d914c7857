"""The earliest of many times that are set, moved and removed: a heap whose outdated entries are dropped when they surface.

Must not know what the times mean, nor what time it is.
"""

from __future__ import annotations

import heapq

_SLACK = 64


class Alarms:
    """One time a key; ties in the order of `ordinal`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._current: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._current)

    def set(self, key: str, time_s: float, ordinal: int) -> None:
        if self._current.get(key) == time_s:
            return
        self._current[key] = time_s
        heapq.heappush(self._heap, (time_s, ordinal, key))
        self._compact()

    def discard(self, key: str) -> None:
        self._current.pop(key, None)
        self._compact()

    def earliest(self) -> tuple[float, str] | None:
        """The earliest time and its key."""
        while self._heap:
            time_s, _, key = self._heap[0]
            if self._current.get(key) == time_s:
                return time_s, key
            heapq.heappop(self._heap)
        return None

    def _compact(self) -> None:
        """Keeps outdated entries fewer than current ones, so that memory stays bounded however often a time moves."""
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            current = {(time_s, ordinal, key) for time_s, ordinal, key in self._heap if self._current.get(key) == time_s}
            self._heap = sorted(current)
