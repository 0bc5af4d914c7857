"""Why requests wait: a code and words for one, counts for all."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.events import QuotasChanged, Submitted
from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.core.request import Lane, Request, Sampling
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.core.waiting import LOOKED_AT, WaitCode

from tests.simulation.world import World, description


def code(world: World, request_id: str) -> WaitCode | None:
    why = world.core.why_waits(request_id)
    return None if why is None else why.code


def test_each_request_has_the_code_of_what_keeps_it_waiting_and_all_are_counted() -> None:
    world = World(SchedulerConfig(max_num_seqs=2), description(num_blocks=8))
    assert world.core.wait_reasons() == {}
    world.submit(1, prompt=15, max_tokens=40)
    world.turn()
    large = world.submit(2, prompt=28, max_tokens=1)
    small = world.submit(4, prompt=1)
    assert (code(world, "r1"), code(world, large), code(world, small)) == (None, WaitCode.NO_BLOCKS, WaitCode.BEHIND_OTHERS)
    other = world.submit(5, model="other")
    assert world.core.wait_reasons() == {"no_blocks": 1, "behind_others": 1, "no_executor": 1}
    world.submit(7, prompt=1, lane=Lane.REAL_TIME)
    assert code(world, small) is WaitCode.LOWER_PRIORITY
    world.turn()
    assert (code(world, small), code(world, other)) == (WaitCode.NO_SLOT, WaitCode.NO_EXECUTOR)
    world.pause()
    assert world.core.wait_reasons() == {"paused": 2, "no_executor": 1}
    world.resume()
    world.drain_executor()
    assert code(world, small) is WaitCode.DRAINED


def test_a_tenant_over_its_quota_is_told_so() -> None:
    world = World(None, description())
    world.handle(QuotasChanged(Quota(), {"ann": Quota(max_num_seqs=1)}))
    world.submit(1, tenant="ann", max_tokens=20)
    world.turn()
    second = world.submit(2, tenant="ann")
    assert code(world, second) is WaitCode.OVER_QUOTA
    assert world.core.wait_reasons() == {"over_quota": 1}


@pytest.mark.parametrize(("slots", "expected"), [(1, WaitCode.BATCH_RUNS), (4, WaitCode.BATCH_NOT_FULL)])
def test_static_batches_say_which_way_they_are_closed(slots: int, expected: WaitCode) -> None:
    world = World(SchedulerConfig(batching="static", max_num_seqs=slots), description())
    for seed in (1, 2):
        world.submit(seed)
        world.turn()
    assert code(world, "r2") is expected


def test_of_a_long_queue_the_first_are_looked_at_and_the_others_are_behind_them() -> None:
    world = World(SchedulerConfig(max_num_seqs=1), description())
    world.submit(1)
    world.turn()
    for seed in range(2, LOOKED_AT + 12):
        world.core.handle(Submitted(Request(f"r{seed}", "tiny", (1,), Sampling(max_tokens=1, seed=1), world.now_s)), world.now_s)
    assert world.core.wait_reasons() == {"no_slot": LOOKED_AT, "behind_others": 10}
