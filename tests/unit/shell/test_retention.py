"""Ended requests are pruned in the background, a few at a time."""

from __future__ import annotations

import pytest
from tokenmill_scheduler import retention
from tokenmill_scheduler.core.request import State

from tests.fakes.ledger_records import run_to_decode, run_to_end
from tests.fakes.memory_ledger import MemoryLedger


class CountingLedger(MemoryLedger):
    def __init__(self) -> None:
        super().__init__()
        self.limits: list[int] = []

    def prune(self, before_s: float, limit: int) -> int:
        self.limits.append(limit)
        return super().prune(before_s, limit)


async def test_what_ended_long_ago_is_pruned_in_small_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 3)
    monkeypatch.setattr(retention, "PAUSE_S", 0.0)
    ledger = CountingLedger()
    for number in range(8):
        run_to_end(ledger, f"old{number}", at_s=110.0 + number)
    run_to_end(ledger, "new", at_s=200.0)
    run_to_decode(ledger, "open")
    assert await retention.prune(ledger, before_s=150.0) == 8
    assert ledger.limits == [3, 3, 3, 3]
    assert [ledger.find(name) is None for name in ("old0", "old7", "new", "open")] == [True, True, False, False]
    stored = ledger.find("open")
    assert stored is not None
    assert stored.state is State.DECODE


async def test_a_database_that_is_away_is_no_failure() -> None:
    ledger = MemoryLedger(unavailable=True)
    assert await retention.prune(ledger, before_s=150.0) == 0
