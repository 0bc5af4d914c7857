"""What each policy promises, on the core with a model executor: order, strictness, guarantees, shares, and that nobody starves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill_scheduler.core.effects import Effect, Transitioned
from tokenmill_scheduler.core.events import Event
from tokenmill_scheduler.core.lanes import guaranteed_slots
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.request import QUEUED, RUNNING, TERMINAL, Lane, Request, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import Record, World, description

few = settings(max_examples=30, deadline=None, derandomize=True)

# Priority, max_tokens, seconds to the deadline, lane, tenant.
SHAPES = st.tuples(
    st.integers(0, 3),
    st.integers(1, 6),
    st.none() | st.integers(1_000, 1_005),
    st.sampled_from(Lane),
    st.sampled_from(["ann", "bob"]),
)
WITHIN: dict[str, Callable[[Request], float]] = {
    "fcfs": lambda request: 0,
    "priority": lambda request: -request.priority,
    "sjf": lambda request: request.sampling.max_tokens,
    "edf": lambda request: inf if request.deadline_s is None else request.deadline_s,
    "lpm": lambda request: 0,
}


def admitted(world: World) -> Iterator[Record]:
    """In order, each time."""
    for effect in world.effects:
        if isinstance(effect, Transitioned) and effect.after is State.PREFILL:
            yield world.records[effect.request_id]


def in_state(world: World, states: frozenset[State]) -> list[Record]:
    return [record for record in world.records.values() if record.state in states]


# ---- order ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@few
@given(shapes=st.lists(SHAPES, min_size=2, max_size=12))
def test_one_slot_serves_lanes_in_turn_and_each_in_the_order_of_the_policy(
    policy: str, shapes: list[tuple[int, int, int | None, Lane, str]]
) -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy=policy, ageing_turn=0), description())
    for seed, (priority, max_tokens, wait_s, lane, tenant) in enumerate(shapes, 1):
        deadline_s = None if wait_s is None else world.now_s + wait_s
        world.submit(seed, max_tokens=max_tokens, priority=priority, deadline_s=deadline_s, lane=lane, tenant=tenant)
    world.drain()
    requests = [record.request for record in admitted(world)]
    arrived = list(world.records)
    expected = sorted(requests, key=lambda r: (r.lane, WITHIN[policy](r), arrived.index(r.request_id)))
    assert requests == expected


def in_turn(requests: list[Request], policy: str, turn: int) -> Iterator[Request]:
    """Every `turn`-th is the oldest, the others as the policy has them; `requests` in the order in which they arrived."""
    left, since = list(requests), 0
    while left:
        ages = policy != "fcfs" and since + 1 >= turn
        chosen = left[0] if ages else min(left, key=WITHIN[policy])
        since = 0 if chosen is left[0] else since + 1
        left.remove(chosen)
        yield chosen


@pytest.mark.parametrize("policy", POLICIES)
@few
@given(shapes=st.lists(SHAPES, min_size=2, max_size=12), turn=st.integers(1, 5), slots=st.integers(1, 12))
def test_ageing_takes_its_turns_within_a_plan_as_across_plans(
    policy: str, shapes: list[tuple[int, int, int | None, Lane, str]], turn: int, slots: int
) -> None:
    config = SchedulerConfig(max_num_seqs=slots, policy=policy, ageing_turn=turn, max_priority_wait_s=0.0)
    world = World(config, description())
    for seed, (priority, max_tokens, wait_s, _, _) in enumerate(shapes, 1):
        world.submit(seed, max_tokens=max_tokens, priority=priority, deadline_s=None if wait_s is None else world.now_s + wait_s)
    arrived = [record.request for record in world.records.values()]
    world.drain()
    assert [record.request for record in admitted(world)] == list(in_turn(arrived, policy, turn))


@few
@given(
    data=st.data(),
    slots=st.integers(1, 4),
    turn=st.integers(1, 4),
    arrivals=st.lists(st.integers(0, 4), min_size=5, max_size=25),
)
def test_priority_is_strict_and_equals_displace_nobody(data: st.DataObject, slots: int, turn: int, arrivals: list[int]) -> None:
    """Whatever the turn of age: nobody here has waited long enough for it."""
    world = World(SchedulerConfig(max_num_seqs=slots, policy="priority", ageing_turn=turn), description())
    for seed, priority in enumerate(arrivals, 1):
        world.submit(seed, max_tokens=data.draw(st.integers(2, 12)), priority=priority)
        seen = len(world.effects)
        world.turn()
        waiting, running = in_state(world, QUEUED), in_state(world, RUNNING)
        best = max((record.request.priority for record in waiting), default=-1)
        assert all(record.request.priority >= best for record in running), "one waits for one of lower priority"
        assert (
            not waiting
            or len(running) == slots
            or any(isinstance(e, Transitioned) and e.finish_reason for e in world.effects[seen:])
        )
        for effect in world.effects[seen:]:
            if isinstance(effect, Transitioned) and effect.after is State.PREEMPTED:
                assert priority > world.records[effect.request_id].request.priority, "displaced by an equal"
    world.drain()
    world.check_idle()


# ---- nobody starves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["sjf", "edf", "priority", "lpm"])
@few
@given(turn=st.integers(1, 8), older=st.integers(0, 3), slots=st.integers(1, 4), fair_share=st.booleans())
def test_c34_c71_under_endless_better_ones_each_request_runs_within_the_bound(
    policy: str, turn: int, older: int, slots: int, fair_share: bool
) -> None:
    config = SchedulerConfig(max_num_seqs=slots, policy=policy, ageing_turn=turn, max_priority_wait_s=0.0, fair_share=fair_share)
    world = World(config, description(caching=policy == "lpm"))
    seeds = iter(range(1, 10_000))

    def submit(*, better: bool) -> str:
        """Warm ones share the first tokens of their prompts, all of one kind."""
        seed = next(seeds)
        seed = 3 * seed if better else 3 * seed + 1
        deadline_s = world.now_s + 9_000 if better else None
        return world.submit(
            seed, prompt=14, max_tokens=1 if better else 9, priority=int(better), deadline_s=deadline_s, tenant="ann"
        )

    for _ in range(slots + 1):
        submit(better=True)
    world.turn()
    worse = [submit(better=False) for _ in range(older + 1)]
    before = len(list(admitted(world)))
    while world.state(worse[-1]) is State.WAITING:
        for _ in range(slots):
            submit(better=True)
        world.turn()
        assert len(list(admitted(world))) - before <= turn * (older + slots + 2), "it starves"
    order = [record.request.request_id for record in admitted(world)][before:]
    # Those that came before the last of the worse are at most the `slots + 1` of the start and the worse themselves.
    assert order.index(worse[-1]) < turn * (older + slots + 2)


@few
@given(slots=st.integers(1, 6), turn=st.integers(2, 6), policy=st.sampled_from(POLICIES))
def test_under_endless_real_time_requests_a_batch_request_runs_within_the_bound(slots: int, turn: int, policy: str) -> None:
    world = World(SchedulerConfig(max_num_seqs=slots, policy=policy, ageing_turn=turn), description())
    world.submit(1, lane=Lane.REAL_TIME, max_tokens=3)
    world.turn()
    low = world.submit(2, lane=Lane.BATCH)
    before = len(list(admitted(world)))
    for seed in range(3, 500):
        world.submit(seed, lane=Lane.REAL_TIME, max_tokens=3)
        world.submit(seed + 1_000, lane=Lane.REAL_TIME, max_tokens=1)
        world.turn()
        if world.state(low) in RUNNING:
            break
    assert world.state(low) in RUNNING
    assert len(list(admitted(world))) - before <= turn + slots


# ---- lanes ---------------------------------------------------------------------------------------------------------------------


@few
@given(
    shares=st.lists(st.integers(0, 10), min_size=3, max_size=3).map(
        lambda parts: tuple(100 * p // max(1, sum(parts)) for p in parts)
    ),
    slots=st.integers(1, 12),
    lengths=st.lists(st.integers(1, 7), min_size=3, max_size=9),
    policy=st.sampled_from(POLICIES),
)
def test_each_lane_has_its_slots_while_it_has_work_and_none_stays_free(
    shares: tuple[int, int, int], slots: int, lengths: list[int], policy: str
) -> None:
    world = World(SchedulerConfig(max_num_seqs=slots, policy=policy, lane_shares=shares, ageing_turn=0), description())
    guaranteed = guaranteed_slots(shares, slots)
    assert sum(guaranteed.values()) <= slots
    length, seeds = cycle(lengths), iter(range(1, 10_000))
    for _ in range(30):
        for lane in Lane:
            while sum(record.request.lane is lane for record in in_state(world, QUEUED)) < slots:
                world.submit(next(seeds), prompt=2, max_tokens=next(length), lane=lane)
        plan = world.plan()
        assert plan is not None
        running = in_state(world, RUNNING)
        assert len(running) == slots, "a slot stays free"
        # Whoever runs runs on: what a lane is guaranteed it gets as slots become free.
        world.step()
        world.deliver()
    taken = {lane: sum(record.request.lane is lane for record in running) for lane in Lane}
    assert all(taken[lane] >= guaranteed[lane] for lane in Lane)


# ---- fair share ----------------------------------------------------------------------------------------------------------------


class Unchecked(World):
    """For long runs: what `World` checks at every event is checked elsewhere."""

    def handle(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now_s)
        for effect in effects:
            self._record(effect)
        return effects


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=4),
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    slots=st.integers(1, 4),
    policy=st.sampled_from(POLICIES),
)
def test_backlogged_tenants_get_tokens_by_their_weights(weights: list[float], lengths: list[int], slots: int, policy: str) -> None:
    """Requests of each tenant have a length of their own; some stop early, and what was charged beforehand is settled."""
    tenants = {f"t{number}": weight for number, weight in enumerate(weights)}
    lengths_of = dict(zip(tenants, cycle(lengths), strict=False))
    world = Unchecked(SchedulerConfig(max_num_seqs=slots, policy=policy, fair_share=True, weights=tenants), description())
    served, waiting, seeds = dict.fromkeys(tenants, 0), dict.fromkeys(tenants, 0), iter(range(1, 1_000_000))
    for _ in range(2_500):
        for tenant in tenants:
            for _ in range(2 * slots - waiting[tenant]):
                world.submit(next(seeds), prompt=3, max_tokens=lengths_of[tenant], tenant=tenant)
        world.turn()
        waiting = dict.fromkeys(tenants, 0)
        for request_id, record in list(world.records.items()):
            waiting[record.request.tenant] += record.state in QUEUED
            if record.state in TERMINAL:
                served[record.request.tenant] += len(record.request.prompt) + len(record.output)
                del world.records[request_id]
    total, total_weight = sum(served.values()), sum(weights)
    for tenant, weight in tenants.items():
        # What runs at the end is not counted.
        assert served[tenant] == pytest.approx(total * weight / total_weight, rel=0.05, abs=slots * 23), served
