"""Quotas of tenants: who is passed over, until when, and that others are not held up."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from tokenmill_scheduler.core.quotas import Quota, Quotas
from tokenmill_scheduler.core.request import Lane, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description


def _states(world: World, *seeds: int) -> str:
    return " ".join(world.state(f"r{seed}") for seed in seeds)


def test_a_tenant_at_its_sequences_waits_and_those_behind_it_run() -> None:
    world = World(SchedulerConfig(max_num_seqs=4), description())
    world.limit(a=Quota(max_num_seqs=2))
    for seed in (1, 2, 4):
        world.submit(seed, tenant="a", max_tokens=6)
    world.submit(5, tenant="b")
    world.turn()
    assert _states(world, 1, 2, 4, 5) == "decode decode waiting decode"
    assert world.core.wait_reason("r4") == "tenant a has 2 of 2 sequences running"
    while world.state("r1") is not State.DONE:
        world.turn()
    world.turn()
    assert world.state("r4") is not State.WAITING
    world.drain()
    world.check_idle()
    assert world.core.counters.preemptions == 0


def test_within_a_tenant_nobody_runs_sooner_for_being_smaller() -> None:
    world = World(None, description())
    world.limit(a=Quota(max_kv_blocks=6))
    world.submit(1, tenant="a", prompt=4, max_tokens=5)
    world.submit(2, tenant="a", prompt=17, max_tokens=4)
    world.submit(4, tenant="a", prompt=1, max_tokens=1)
    world.turn()
    assert _states(world, 1, 2, 4) == "decode waiting waiting"
    assert world.core.wait_reason("r2").startswith("tenant a may hold 6 KV blocks")
    world.drain()
    world.check_idle()
    assert [admission.sampling.seed for plan in world.plans for admission in plan.admit] == [1, 2, 4]


def test_blocks_count_until_the_executor_has_let_go_of_them() -> None:
    world = World(None, description())
    world.limit(a=Quota(max_kv_blocks=2))
    world.submit(1, tenant="a", prompt=4, max_tokens=5)
    world.submit(2, tenant="a", prompt=4, max_tokens=5)
    world.turn()
    world.cancel("r1")
    released = world.plan()
    assert released is not None
    assert (released.release, released.admit) == ((1,), ())
    world.step()
    world.deliver()
    admitted = world.turn()
    assert admitted is not None
    assert len(admitted.admit) == 1
    world.drain()
    world.check_idle()


def test_tokens_a_second_are_paid_before_the_next_request_runs() -> None:
    world = World(None, description())
    world.limit(a=Quota(max_tokens_per_s=10))
    world.submit(1, tenant="a", prompt=24, max_tokens=1)
    world.submit(2, tenant="a", prompt=4, max_tokens=1)
    world.submit(4, tenant="b", prompt=4, max_tokens=1)
    start_s = world.now_s
    world.turn()
    # 10 in the bucket, 24 of the prompt and one of output taken.
    assert _states(world, 1, 2, 4) == "done waiting done"
    assert world.core.wait_reason("r2") == "tenant a has used up its 10 tokens per second"
    assert world.plan() is None
    # 15 in debt, and one token is enough to go on.
    assert world.core.next_wakeup_s() == start_s + 1.6
    world.tick(1.5)
    assert world.plan() is None
    world.tick(0.1)
    world.turn()
    assert world.state("r2") is State.DONE
    assert world.core.next_wakeup_s() is None


def test_output_counts_and_what_runs_goes_on_in_debt() -> None:
    world = World(None, description())
    world.limit(a=Quota(max_tokens_per_s=10))
    world.submit(1, tenant="a", prompt=4, max_tokens=20)
    while world.state("r1") is not State.DONE:
        world.turn()
    assert len(world.output("r1")) == 20
    world.submit(2, tenant="a")
    assert world.plan() is None
    # 10 − 4 − 20, and one to go on with.
    assert world.core.tokens_ready_s("a", world.now_s) == world.now_s + 1.5


def test_a_request_over_its_quota_displaces_nobody() -> None:
    world = World(SchedulerConfig(max_num_seqs=2, policy="priority"), description())
    world.limit(a=Quota(max_num_seqs=1))
    for seed in (1, 2):
        world.submit(seed, max_tokens=20)
    world.turn()
    for seed in (4, 5):
        world.submit(seed, tenant="a", priority=5, max_tokens=20)
    world.turn()
    world.turn()
    assert _states(world, 1, 2, 4, 5) == "decode preempted decode waiting"
    assert world.core.counters.preemptions == 1
    world.drain()
    world.check_idle()


def test_a_change_holds_from_now_on() -> None:
    world = World(None, description())
    for seed in (1, 2, 4):
        world.submit(seed, tenant="a", max_tokens=20)
    world.turn()
    world.limit(a=Quota(max_num_seqs=1))
    world.submit(5, tenant="a")
    world.turn()
    assert _states(world, 1, 2, 4, 5) == "decode decode decode waiting"
    world.limit(a=Quota(max_num_seqs=4))
    world.turn()
    assert world.state("r5") is State.DECODE
    world.drain()
    world.check_idle()


def test_no_sequences_at_all_means_waiting_and_nobody_else_does() -> None:
    world = World(SchedulerConfig(max_num_seqs=2), description())
    world.limit(a=Quota(max_num_seqs=0), c=Quota(max_tokens_per_s=0))
    world.submit(1, tenant="a", lane=Lane.REAL_TIME)
    world.submit(2, tenant="c", lane=Lane.REAL_TIME)
    for seed in range(3, 30):
        world.submit(seed)
    world.drain()
    assert world.unfinished == ["r1", "r2"]
    world.limit()
    world.drain()
    world.check_idle()


def test_c32_who_waits_for_what_never_comes_is_ended_by_its_queue_timeout_and_a_fifth_runs() -> None:
    world = World(SchedulerConfig(max_num_seqs=4), description())
    world.limit(a=Quota(max_num_seqs=0))
    for seed in (1, 2, 4, 5):
        world.submit(seed, tenant="a", queue_deadline_s=world.now_s + 5)
    world.submit(7, tenant="b")
    world.turn()
    assert _states(world, 1, 2, 4, 5, 7) == "waiting waiting waiting waiting decode"
    world.drain()
    assert _states(world, 1, 2, 4, 5, 7) == "expired expired expired expired done"
    world.check_idle()
    assert {admission.sampling.seed for plan in world.plans for admission in plan.admit} == {7}


def test_what_is_asked_of_a_quota_beforehand() -> None:
    world = World(None, description(block_size=4))
    world.submit(1, tenant="a", prompt=4, max_tokens=6)
    request = world.records["r1"].request
    world.limit(a=Quota(max_kv_blocks=2))
    most = "the request may come to 3 KV blocks, more than the 2 that tenant a may hold: ask for a lower max_tokens"
    assert world.core.never_within_quota(request) == most
    world.limit(a=Quota(max_kv_blocks=3, max_num_seqs=1))
    assert world.core.never_within_quota(request) == ""
    choices = "the request has 2 choices, and tenant a may have 1 sequences running: ask for fewer"
    assert world.core.never_within_quota(replace(request, best_of=2)) == choices
    # Its like is queued already.
    assert world.core.over_quota(request, world.now_s) == "tenant a has 0 of 1 sequences running, and 1 waiting"


def test_tenants_that_use_nothing_are_forgotten() -> None:
    quotas = Quotas()
    quotas.change(Quota(max_tokens_per_s=5, max_num_seqs=1), {}, 0.0)
    for number in range(1_000):
        quotas.spent(f"t{number}", 10, 0.0)
        quotas.admitted(number, f"t{number}", 3, 0.0)
        quotas.freed(number, 100.0)
    assert len(quotas._usage) < 100
    assert quotas.in_use("t999") == (0, 0)
    # One in debt is not.
    assert quotas.ready_s("t999", 0.0) > 0.0


def test_who_is_over_quota_is_remembered_though_names_are_many() -> None:
    """Those that the latest plans passed over, and until when those were that have been let go."""
    quotas = Quotas()
    quotas.change(Quota(max_num_seqs=0), {}, 0.0)
    for number in range(1_000):
        quotas.passed_over(f"t{number}", 1.0)
        quotas.passed_over("always there", 1.0)
    assert len(quotas._limited) < 100
    assert [quotas.limited_until_s(tenant, 2.0) for tenant in ("t999", "always there")] == [inf, inf]
    quotas.change(Quota(), {}, 3.0)
    quotas.change(Quota(), {}, 4.0)
    assert quotas.limited_until_s("t999", 5.0) == 3.0
    assert quotas.limited_until_s("t0", 5.0) == -inf
