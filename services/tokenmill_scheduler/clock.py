"""The scheduler's time of day. Must not know: what is timed."""

from __future__ import annotations

import time
from collections.abc import Callable


class UnixClock:
    """Unix seconds that never go back and never stand still.

    Both `wall` and `steady` are in seconds. Where the wall clock goes ahead this one goes with it; where that is set back this one
    runs on from where it is. It stays ahead then, until the next start: a clock that waited for the wall clock to come up would let
    no time limit pass meanwhile, and a limit that begins now would be over before it begins.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._steady = steady
        self._ahead_s = wall() - steady()

    def __call__(self) -> float:
        # The wall first: a process that is stopped between the two looks must not take that for a jump ahead.
        wall_s = self._wall()
        steady_s = self._steady()
        self._ahead_s = max(self._ahead_s, wall_s - steady_s)
        return steady_s + self._ahead_s
