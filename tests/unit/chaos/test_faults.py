from __future__ import annotations

import random

import pytest

from benchmarks.chaos.faults import KINDS, draw


@pytest.mark.parametrize("database", KINDS)
def test_a_seed_gives_its_schedule_and_every_kind_comes_before_any_comes_twice(database: str) -> None:
    kinds = KINDS[database]
    faults = draw(random.Random(5), kinds, for_s=200.0, mean_gap_s=1.0)
    assert faults == draw(random.Random(5), kinds, for_s=200.0, mean_gap_s=1.0)
    assert faults != draw(random.Random(6), kinds, for_s=200.0, mean_gap_s=1.0)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert 100 < len(faults) < 300
    for start in range(0, len(faults) - len(kinds), len(kinds)):
        assert sorted(fault.kind for fault in faults[start : start + len(kinds)]) == sorted(kinds)
