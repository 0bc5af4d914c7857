"""In what order a plan looks at a queue, and how requests rank, apart from executors and plans."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill_scheduler.core.lineup import Lineup
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.policy import POLICIES, policy_named
from tokenmill_scheduler.core.queue import WaitingQueue
from tokenmill_scheduler.core.request import Lane, Request, Sampling, State

NOW_S = 1_000.0
TENANTS = ("ann", "bob", "cid")


def remaining(live: LiveRequest) -> int:
    return live.request.sampling.max_tokens


def live(
    ordinal: int,
    *,
    max_tokens: int = 8,
    priority: int = 0,
    deadline_s: float | None = None,
    tenant: str = "ann",
    lane: Lane = Lane.STANDARD,
    state: State = State.WAITING,
) -> LiveRequest:
    sampling = Sampling(max_tokens=max_tokens, seed=0)
    request = Request(f"r{ordinal}", "tiny", (1, 2), sampling, float(ordinal), priority, deadline_s, tenant, lane=lane)
    return LiveRequest(request, ordinal, state)


def ordering(policy: str, turn: int = 0, **more: object) -> Ordering:
    return Ordering(policy_named(policy, remaining), remaining, (0, 0, 0), ageing_turn=turn, max_priority_wait_s=0.0, **more)  # type: ignore[arg-type]


def queue_of(requests: Sequence[LiveRequest], by: Ordering) -> WaitingQueue:
    queue = WaitingQueue(by)
    for request in requests:
        queue.add(request)
    return queue


def lineup_of(queue: WaitingQueue, running: dict[Lane, int] | None = None) -> Lineup:
    return Lineup(queue, {**dict.fromkeys(Lane, 0), **(running or {})}, 64, NOW_S, lambda one: 0)


@pytest.mark.parametrize(
    ("policy", "sooner", "preempted"),
    [
        ("sjf", {"max_tokens": 3}, {"max_tokens": 9}),
        ("edf", {"deadline_s": 2_000.0}, {"deadline_s": 3_000.0}),
        ("edf", {"deadline_s": 2_000.0}, {}),
        ("priority", {"priority": 2}, {"priority": 1}),
    ],
)
def test_c25_a_preempted_request_is_first_among_its_equals_and_no_others(
    policy: str, sooner: dict[str, float], preempted: dict[str, float]
) -> None:
    resumed = live(1, state=State.PREEMPTED, **preempted)  # type: ignore[arg-type]
    better, equal = live(2, **sooner), live(0, **preempted)  # type: ignore[arg-type]
    assert list(queue_of([resumed, better, equal], ordering(policy))) == [better, resumed, equal]


@pytest.mark.parametrize(("running", "first"), [(0, "r2"), (1, "r1")])
def test_a_lane_that_was_passed_over_goes_first_only_if_nothing_of_it_runs(running: int, first: str) -> None:
    queue = queue_of([live(1, lane=Lane.REAL_TIME), live(2, lane=Lane.BATCH)], ordering("fcfs", turn=4))
    queue.lanes[Lane.BATCH].passed_over = 4
    assert next(iter(lineup_of(queue, {Lane.BATCH: running}))).request_id == first


def test_priority_is_strict_until_a_request_has_waited_as_long_as_that_takes() -> None:
    by = Ordering(policy_named("priority", remaining), remaining, (0, 0, 0), ageing_turn=1, max_priority_wait_s=300.0)
    queue = queue_of([live(1), live(2, priority=5)], by)
    for now_s, first in ((300.9, "r2"), (301.0, "r1")):
        assert next(iter(Lineup(queue, dict.fromkeys(Lane, 0), 64, now_s))).request_id == first


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    data=st.data(),
    policy=st.sampled_from(POLICIES),
    turn=st.integers(0, 4),
    shared=st.booleans(),
    shapes=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 9), st.sampled_from(Lane)), min_size=1, max_size=16),
)
def test_each_is_given_out_once_whoever_is_admitted_passed_or_skipped_meanwhile(
    data: st.DataObject, policy: str, turn: int, shared: bool, shapes: list[tuple[str, int, Lane]]
) -> None:
    """None of a tenant or a lane once that is skipped; all others in the end."""
    requests = [
        live(ordinal, tenant=tenant, max_tokens=max_tokens, priority=max_tokens, deadline_s=2e3 + max_tokens, lane=lane)
        for ordinal, (tenant, max_tokens, lane) in enumerate(shapes)
    ]
    queue = queue_of(requests, ordering(policy, turn, fair_share=shared))
    lineup, given_out = lineup_of(queue), list[LiveRequest]()
    tenants, lanes = set[str](), set[Lane]()
    for one in lineup:
        assert one not in given_out
        assert one.request.tenant not in tenants
        assert one.request.lane not in lanes
        given_out.append(one)
        what = data.draw(st.sampled_from(["admit", "admit", "pass", "waive", "skip tenant", "skip lane"]))
        if what == "admit":
            lineup.admits(one)
            queue.admitted(one, NOW_S)
            queue.remove(one)
        elif what == "waive":
            lineup.passes()
        elif what == "skip tenant":
            tenants.add(one.request.tenant)
            lineup.skip_tenant(one.request.tenant)
        elif what == "skip lane":
            lanes.add(one.request.lane)
            lineup.skip_lane(one.request.lane)
    left = [one for one in requests if one.request.tenant not in tenants and one.request.lane not in lanes]
    assert all(one in given_out for one in left)
