"""The scheduler's clock, while the machine's is set to and fro."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tokenmill_scheduler.clock import SLEW, UnixClock


@dataclass
class Machine:
    """A wall clock that can be set, and one that only runs on. `stop_s`: whoever looks at one is stopped for so long afterwards."""

    wall_s: float = 1_000_000.0
    steady_s: float = 50.0
    stop_s: float = 0.0

    def run(self, seconds: float) -> None:
        self.wall_s += seconds
        self.steady_s += seconds

    def clock(self) -> UnixClock:
        return UnixClock(lambda: self._look(self.wall_s), lambda: self._look(self.steady_s))

    def _look(self, now_s: float) -> float:
        self.run(self.stop_s)
        return now_s


def test_it_is_the_wall_clock_also_after_that_has_gone_ahead() -> None:
    machine = Machine()
    clock = machine.clock()
    assert clock() == 1_000_000.0
    machine.run(10.0)
    assert clock() == 1_000_010.0
    machine.wall_s += 3600.0
    assert clock() == 1_003_610.0


def test_it_runs_on_when_the_wall_clock_is_set_back() -> None:
    machine = Machine()
    clock = machine.clock()
    for jump_s in (3600.0, -3600.0, -86_400.0):
        machine.wall_s += jump_s
        clock()
    machine.run(2.0)
    assert clock() == 1_003_600.0 + 2.0 * (1 - SLEW)
    machine.run(0.5)
    assert clock() == pytest.approx(1_003_600.0 + 2.5 * (1 - SLEW), abs=1e-6)


def test_it_comes_back_to_the_wall_clock_and_never_goes_back_itself() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall_s += 60.0
    clock()
    machine.wall_s -= 60.0
    times_s = [clock()]
    for _ in range(100):
        machine.run(60.0)
        times_s.append(clock())
        assert times_s[-1] >= times_s[-2] + 60.0 * (1 - SLEW) - 1e-6
        assert times_s[-1] >= machine.wall_s
    ahead_s = [time_s - 1_000_000.0 - 60.0 * minute for minute, time_s in enumerate(times_s)]
    assert [ahead_s[minute] for minute in (0, 25, 49)] == pytest.approx([60.0, 30.0, 1.2])
    assert set(ahead_s[51:]) == {0.0}


def test_a_stop_between_its_two_looks_is_no_jump() -> None:
    machine = Machine(stop_s=30.0)
    clock = machine.clock()
    clock()
    machine.stop_s = 0.0
    assert clock() == machine.wall_s
