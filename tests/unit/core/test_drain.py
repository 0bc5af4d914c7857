"""How fast a queue empties: the first moments foretell nothing, a steady rate is seen at once and followed when it changes."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.drain import LEAST_HISTORY_S, Rate


def test_what_fills_the_free_slots_at_first_is_not_taken_for_the_rate_of_all_that_follows() -> None:
    rate = Rate()
    for place in range(4):
        rate.add(1, 100 + 0.01 * place)
    assert rate.per_s(100.03) == pytest.approx(4 / LEAST_HISTORY_S, rel=0.1)


@pytest.mark.parametrize("seconds", [2, 10, 100])
def test_a_steady_rate_is_told_whatever_the_history(seconds: int) -> None:
    rate = Rate()
    for place in range(50 * seconds):
        rate.add(2, 100 + place / 50)
    assert rate.per_s(100 + seconds) == pytest.approx(100, rel=0.05)


def test_it_follows_a_change_and_forgets() -> None:
    rate = Rate()
    for place in range(1000):
        rate.add(1, 100 + place / 10)
    for place in range(1000):
        rate.add(1, 200 + place / 100)
    assert 60 < rate.per_s(210) < 100
    assert rate.per_s(300) < 1


def test_nothing_has_no_rate() -> None:
    assert Rate().per_s(5) == 0
