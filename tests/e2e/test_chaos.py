"""Seconds of what `benchmarks/chaos` does for minutes: a fault of every kind, with 20 streams open, on either database.

C05, C40: executors are killed; their blocks are all free in the end. C45: services are told to end. C47: executors are cut off with
plans on their way. C72: the scheduler is killed. C73: the database is away.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tokenmill_scheduler.core.choices import SEPARATOR

from benchmarks.chaos.faults import KINDS, Fault, Target, draw
from benchmarks.chaos.report import told
from benchmarks.chaos.run import Options, run

SEED = 1
GAP_S = 0.6
# An executor is lost when it is silent for 2 s; all others need not be away for long.
LONGEST_S = {Target.EXECUTOR: 2.3, Target.EXECUTOR_LINK: 2.3}


def one_of_each(database: str) -> tuple[Fault, ...]:
    """In an order, and for as long, as the seed says; one after the other, yet overlapping."""
    kinds = KINDS[database]
    faults = draw(random.Random(SEED), kinds, for_s=1_000.0, mean_gap_s=1.0)[: len(kinds)]
    return tuple(
        replace(fault, at_s=number * GAP_S, lasts_s=min(fault.lasts_s, LONGEST_S.get(fault.target, GAP_S / 2)))
        for number, fault in enumerate(faults)
    )


@pytest.mark.parametrize("database", KINDS)
async def test_c05_c40_c45_c47_c72_c73_faults_of_every_kind_lose_nothing_and_change_nothing(database: str) -> None:
    faults = one_of_each(database)
    outcome = await run(Options(database, SEED, streams=20, max_tokens=300, faults=faults))
    assert list(told(outcome)) == []
    assert {befell.fault for befell in outcome.befell} == set(faults)
    # The clients were at work, and it was them who were judged.
    assert sum(stored.state == "done" for stored in outcome.stored.values()) >= 20
    assert any(stored.state == "done" for request_id, stored in outcome.stored.items() if SEPARATOR in request_id), "of groups, too"
