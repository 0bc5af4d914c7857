"""The scheduler's time of day. Must not know: what is timed."""

from __future__ import annotations

import time
from collections.abc import Callable

# How much slower it runs while it is ahead of the wall clock: an hour is made good in 50, and a time limit is late by 2 % at most.
SLEW = 1 / 50


class UnixClock:
    """Unix seconds that never go back and never stand still.

    Both `wall` and `steady` are in seconds. Where the wall clock goes ahead this one goes with it; where that is set back this one
    runs on from where it is, a little slower until the two agree again. A clock that waited for the wall clock to come up would let
    no time limit pass meanwhile, and a limit that begins now would be over before it begins.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._steady = steady
        # The wall first, here and below: a process that is stopped between the two looks must not take that for a jump ahead.
        wall_s = wall()
        self._steady_s = steady()
        # Of the steady clock.
        self._ahead_s = wall_s - self._steady_s

    def __call__(self) -> float:
        wall_s = self._wall()
        steady_s = self._steady()
        passed_s, self._steady_s = steady_s - self._steady_s, steady_s
        self._ahead_s = max(self._ahead_s - SLEW * passed_s, wall_s - steady_s)
        return steady_s + self._ahead_s
